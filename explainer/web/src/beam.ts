/** Beam search as a tree. Section 6.1. */

import { linkHorizontal } from "d3-shape";
import { choices, slider } from "./controls";
import { formula, h, hideTip, s, showTip, shown } from "./dom";
import type { Model } from "./model";
import { numberTable } from "./pictures";
import type { Found, TreeNode } from "./search";
import { state, writeLink } from "./state";
import { text } from "./text";

const words = text.search;
export const MOST_BEAMS = 8;
export const MOST_ALPHA = 2;
const COLUMN = 104;
const ROW = 46;
const BOX = { width: 78, height: 26 };
const MOST_LETTERS = 9;

const short = (name: string) =>
  name.length > MOST_LETTERS ? `${name.slice(0, MOST_LETTERS - 1)}…` : name;

/** Return the section, and a function that shows a search in it. */
export function searchSection(model: Model, searchAgain: () => void) {
  const body = h("div", { class: "search-body" });
  const beams = choices(
    words.beams,
    "beams",
    Array.from({ length: MOST_BEAMS }, (_, i) => ({ value: String(i + 1), label: String(i + 1) })),
    String(state.beams),
    (value) => {
      state.beams = Number(value);
      writeLink();
      searchAgain();
    },
  );
  const alpha = slider(
    words.alpha,
    "alpha",
    [0, MOST_ALPHA, 0.1],
    state.alpha,
    (value) => shown(value, 1),
    (value) => {
      state.alpha = value;
      writeLink();
      searchAgain();
    },
  );
  const element = h(
    "section",
    { id: "search", class: "view", "aria-labelledby": "search-title" },
    h("h2", { id: "search-title" }, words.title),
    h("p", { class: "lead" }, words.lead),
    h("div", { class: "bar-controls is-static" }, beams.element, alpha.element),
    body,
  );

  const textOf = (found: Found, node: TreeNode): string => {
    const ids = [];
    for (let one = node; one.parent >= 0; one = found.nodes[one.parent]) ids.push(one.token);
    return model.detokenize(ids.reverse());
  };

  const show = (found: Found) => {
    beams.set(String(state.beams));
    alpha.set(state.alpha);
    const [best] = found.complete;
    const finished = new Map(found.complete.map((one) => [one.node, one]));
    const onPath = new Set<number>();
    for (let id = best.node; id >= 0; id = found.nodes[id].parent) onPath.add(id);
    // a sequence lives as long as one that continues it is complete
    const alive = new Set<number>();
    for (const one of found.complete)
      for (let id = one.node; id >= 0; id = found.nodes[id].parent) alive.add(id);
    const columns: TreeNode[][] = [];
    for (const node of found.nodes) (columns[node.depth] ??= []).push(node);
    const place = new Map<number, [number, number]>();
    const most = Math.max(...columns.map((column) => column.length));
    columns.forEach((column, depth) => {
      column.sort((a, b) => b.total - a.total);
      column.forEach((node, row) => place.set(node.id, [depth * COLUMN + 8, row * ROW + 8]));
    });
    const width = columns.length * COLUMN;
    const height = most * ROW + 8;
    const svg = s("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "group",
      "aria-label": words.tree(found.steps, found.nodes.length - 1),
    });
    const link = linkHorizontal<unknown, [number, number]>();
    const kindOf = (node: TreeNode) =>
      onPath.has(node.id) ? "is-best" : alive.has(node.id) ? "is-alive" : "is-dead";
    const order = ["is-dead", "is-alive", "is-best"];
    const nodes = [...found.nodes].sort(
      (a, b) => order.indexOf(kindOf(a)) - order.indexOf(kindOf(b)),
    );
    for (const node of nodes) {
      if (node.parent < 0) continue;
      const [fromX, fromY] = place.get(node.parent)!;
      const [toX, toY] = place.get(node.id)!;
      const d = link({
        source: [fromX + BOX.width, fromY + BOX.height / 2],
        target: [toX, toY + BOX.height / 2],
      });
      svg.append(s("path", { class: `edge ${kindOf(node)}`, d: d ?? undefined }));
    }
    for (const node of nodes) {
      const [x, y] = place.get(node.id)!;
      const done = finished.get(node.id);
      const name = model.nameOf(node.token);
      const sequence = textOf(found, node);
      const says = done
        ? words.ended(sequence, shown(done.total, 3), shown(done.penalty, 3), shown(done.score, 3))
        : words.node(sequence, shown(node.logProb, 3), shown(node.total, 3));
      const group = s(
        "g",
        {
          class: `node ${kindOf(node)} ${node.isEnd ? "is-end" : ""}`,
          transform: `translate(${x},${y})`,
          tabindex: 0,
          role: "img",
          "aria-label": says,
          focus: () => {
            const { left, bottom } = group.getBoundingClientRect();
            showTip(says, { clientX: left, clientY: bottom });
          },
          blur: hideTip,
          pointermove: (event) => showTip(says, event as PointerEvent),
          pointerleave: hideTip,
        },
        s("rect", { width: BOX.width, height: BOX.height, rx: node.isEnd ? 13 : 5 }),
        s("text", { x: BOX.width / 2, y: 17, "text-anchor": "middle" }, short(name)),
        node.parent >= 0 &&
          s(
            "text",
            { class: "node-score", x: BOX.width / 2, y: BOX.height + 11, "text-anchor": "middle" },
            done ? `= ${shown(done.score, 2)}` : shown(node.total, 2),
          ),
      );
      svg.append(group);
    }
    const mark = (kind: string, name: string) =>
      h("span", { class: `mark ${kind}` }, h("i", {}), name);
    const scroller = h(
      "div",
      {
        class: "scroller",
        tabindex: 0,
        role: "region",
        "aria-label": words.tree(found.steps, found.nodes.length - 1),
      },
      svg,
    );
    const left = body.querySelector(".scroller")?.scrollLeft ?? 0;
    const rows = found.complete.map((one) => ({
      name: model.detokenize(one.ids) || "–",
      cells: [String(one.length), one.total, one.penalty, one.score],
    }));
    const table = numberTable(words.table, words.columns, rows);
    table.classList.add("is-hypotheses");
    body.replaceChildren(
      h(
        "div",
        { class: "marks", "aria-hidden": "true" },
        mark("is-best", words.legend.best),
        mark("is-alive", words.legend.open),
        mark("is-dead", words.legend.dead),
        mark("is-end", words.legend.end),
      ),
      scroller,
      h(
        "div",
        { class: "pair is-search" },
        h("div", { class: "card" }, h("h4", {}, words.table), table),
        h(
          "div",
          { class: "card" },
          h("h4", {}, words.penaltyTitle),
          h("p", { class: "says" }, words.says),
          formula(words.equation),
        ),
      ),
    );
    scroller.scrollLeft = left;
  };
  return { element, show };
}
