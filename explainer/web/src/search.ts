/** Beam search of section 6.1, with every step of it kept for the tree. */

import type { Encoded, Model } from "./model";

export interface TreeNode {
  id: number;
  parent: number;
  /** Number of tokens, which is the column in the tree. */
  depth: number;
  token: number;
  /** Log-probability of the token after its prefix, and of the whole sequence. */
  logProb: number;
  total: number;
  isEnd: boolean;
}

export interface Hypothesis {
  node: number;
  ids: number[];
  total: number;
  length: number;
  penalty: number;
  score: number;
  isCut: boolean;
}

export interface Found {
  nodes: TreeNode[];
  /** Complete hypotheses, best first; with one beam the only one. */
  complete: Hypothesis[];
  steps: number;
}

/** Return the length penalty ((5 + |y|) / 6)^alpha of Wu et al. (2016). */
export function lengthPenalty(length: number, alpha: number): number {
  return ((5 + length) / 6) ** alpha;
}

/** The search was replaced by a newer one. */
export class Replaced extends Error {}

/**
 * Search as the package does: keep the most probable open sequences, store those that end, and stop
 * when no open one can still become the best. With one beam it is greedy search.
 */
export async function search(
  model: Model,
  encoded: Encoded,
  beams: number,
  alpha: number,
  isCurrent: () => boolean = () => true,
): Promise<Found> {
  const { about } = model;
  const limit = encoded.ids.length + about.max_extra_tokens;
  const ends = new Set(about.ends);
  const nodes: TreeNode[] = [
    { id: 0, parent: -1, depth: 0, token: about.start, logProb: 0, total: 0, isEnd: false },
  ];
  const sequence = (node: TreeNode): number[] => {
    const ids = [];
    for (let one = node; one.parent >= 0; one = nodes[one.parent]) ids.push(one.token);
    return ids.reverse();
  };
  const hypothesis = (node: TreeNode, isCut = false): Hypothesis => {
    const penalty = lengthPenalty(node.depth, alpha);
    const score = node.total / penalty;
    const rest = { total: node.total, length: node.depth, penalty, score, isCut };
    return { node: node.id, ids: sequence(node), ...rest };
  };
  // each end token may take the candidates of all beams, and as many sequences must stay open
  const numCandidates = beams === 1 ? 1 : Math.max(2, 1 + ends.size) * beams;
  let open = [nodes[0]];
  let complete: Hypothesis[] = [];
  for (let step = 1; ; step++) {
    const prefixes = open.map((node) => [about.start, ...sequence(node)]);
    const scored = await model.nextLogProbs(prefixes, encoded);
    if (!isCurrent()) throw new Replaced();
    const candidates: TreeNode[] = [];
    scored.forEach((logProbs, row) => {
      for (const token of about.suppressed) logProbs[token] = -Infinity;
      for (const token of highest(logProbs, numCandidates))
        candidates.push({
          id: -1,
          parent: open[row].id,
          depth: step,
          token,
          logProb: logProbs[token],
          total: open[row].total + logProbs[token],
          isEnd: ends.has(token),
        });
    });
    candidates.sort((a, b) => b.total - a.total);
    candidates.length = Math.min(candidates.length, numCandidates);
    const keep = (node: TreeNode) => {
      node.id = nodes.length;
      nodes.push(node);
      return node;
    };
    const continued = candidates.filter((one) => !one.isEnd).slice(0, beams);
    const ended = candidates.filter((one) => one.isEnd && Number.isFinite(one.total));
    const before = complete;
    for (const node of ended) {
      const score = node.total / lengthPenalty(step, alpha);
      if (before.length < beams || score > before[beams - 1].score)
        complete = [...complete, hypothesis(keep(node))];
    }
    complete = complete.sort((a, b) => b.score - a.score).slice(0, beams);
    open = continued.map(keep);
    if (step >= limit) {
      const cut = open.map((node) => hypothesis(node, true));
      complete = [...complete, ...cut.slice(0, beams - complete.length)];
      return { nodes, complete, steps: step };
    }
    // a sum of log-probabilities only falls, so the penalties at both ends bound the score
    const best = open.length ? open[0].total : -Infinity;
    const attainable = Math.max(
      best / lengthPenalty(step + 1, alpha),
      best / lengthPenalty(limit, alpha),
    );
    if (complete.length && complete[0].score >= attainable) return { nodes, complete, steps: step };
  }
}

/** Return the indices of the highest values, best first. */
export function highest(values: Float64Array, count: number): number[] {
  const best: number[] = [];
  for (let index = 0; index < values.length; index++) {
    const value = values[index];
    if (best.length === count && value <= values[best[count - 1]]) continue;
    let place = best.length;
    while (place > 0 && values[best[place - 1]] < value) place--;
    best.splice(place, 0, index);
    if (best.length > count) best.pop();
  }
  return best;
}
