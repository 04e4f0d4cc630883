/** Codes of positions and their properties. Section 3.5; the formulas are those of the package. */

import { randomLcg, randomNormal } from "d3-random";

export const CANDIDATES = [
  "integer",
  "fraction",
  "sine",
  "pairs",
  "binary",
  "sinusoidal",
  "learned",
] as const;
export type Candidate = (typeof CANDIDATES)[number];

/** Two positions are the same if they are at most this share of the median step apart. */
const LEAST_DISTANCE = 0.1;

export interface Code {
  rows: number;
  columns: number;
  data: Float32Array;
}

/** Return the number of bits of a number. */
export function bitLength(value: number): number {
  return value < 1 ? 0 : Math.floor(Math.log2(value)) + 1;
}

/** Return the number of features of a code. */
export function widthOf(candidate: Candidate, n: number, d: number): number {
  if (candidate === "binary") return Math.max(d, bitLength(n - 1));
  return ["pairs", "sinusoidal", "learned"].includes(candidate) ? d : 1;
}

/** Return the angle by which each pair of a code turns in one step; empty for codes without pairs. */
export function frequencies(candidate: Candidate, d: number, base: number): Float64Array {
  if (candidate === "pairs")
    return Float64Array.from({ length: d / 2 }, (_, pair) => 1 / (pair + 1));
  if (candidate !== "sinusoidal") return new Float64Array();
  return Float64Array.from({ length: d / 2 }, (_, pair) => base ** (-(2 * pair) / d));
}

/** Return the code of positions 0 to n - 1. */
export function encode(candidate: Candidate, n: number, d: number, base: number): Code {
  const columns = widthOf(candidate, n, d);
  const data = new Float32Array(n * columns);
  const turns = frequencies(candidate, d, base);
  // a learned table before its training, the same one each time
  const initial = randomNormal.source(randomLcg(1))(0, d ** -0.5);
  for (let pos = 0; pos < n; pos++) {
    const from = pos * columns;
    if (candidate === "integer") data[from] = pos;
    else if (candidate === "fraction") data[from] = (pos + 1) / n;
    else if (candidate === "sine") data[from] = Math.sin(pos);
    else if (candidate === "binary")
      for (let bit = 0; bit < columns; bit++) data[from + bit] = bit > 30 ? 0 : (pos >> bit) & 1;
    else if (candidate === "learned")
      for (let feature = 0; feature < columns; feature++) data[from + feature] = initial();
    else
      turns.forEach((turn, pair) => {
        data[from + 2 * pair] = Math.sin(pos * turn);
        data[from + 2 * pair + 1] = Math.cos(pos * turn);
      });
  }
  return { rows: n, columns, data };
}

export interface Compared {
  /** Cosine similarity, [n, n]. */
  similarity: Float32Array;
  /** Pairs of the same positions, later one first. */
  collisions: [number, number][];
  /** Mean, lowest and highest dot product at each distance, [n]. */
  mean: Float64Array;
  lowest: Float64Array;
  highest: Float64Array;
}

/** Compare every two positions of a code. */
export function compare(code: Code): Compared {
  const { rows, columns, data } = code;
  const products = new Float64Array(rows * rows);
  for (let a = 0; a < rows; a++)
    for (let b = 0; b <= a; b++) {
      let sum = 0;
      const left = a * columns;
      const right = b * columns;
      for (let i = 0; i < columns; i++) sum += data[left + i] * data[right + i];
      products[a * rows + b] = sum;
      products[b * rows + a] = sum;
    }
  const norms = Float64Array.from({ length: rows }, (_, a) => Math.sqrt(products[a * rows + a]));
  const similarity = new Float32Array(rows * rows);
  for (let a = 0; a < rows; a++)
    for (let b = 0; b < rows; b++) {
      const size = norms[a] * norms[b];
      similarity[a * rows + b] = size ? products[a * rows + b] / size : 0;
    }
  const distance = (a: number, b: number) => {
    let sum = 0;
    for (let i = 0; i < columns; i++) sum += (data[a * columns + i] - data[b * columns + i]) ** 2;
    return Math.sqrt(sum);
  };
  const steps = Float64Array.from({ length: rows - 1 }, (_, a) => distance(a, a + 1)).sort();
  // the lower one of two middle steps, as in the package
  const tolerance = LEAST_DISTANCE * (steps[Math.floor((steps.length - 1) / 2)] ?? 0);
  // the product form of the distance rounds, so it only chooses what the exact form decides
  const near = tolerance ** 2 * 1.01;
  const collisions: [number, number][] = [];
  for (let a = 0; a < rows; a++)
    for (let b = 0; b < a; b++) {
      const scale = products[a * rows + a] + products[b * rows + b];
      const squared = scale - 2 * products[a * rows + b];
      if (squared <= near + 1e-9 * scale && distance(a, b) <= tolerance) collisions.push([a, b]);
    }
  const mean = new Float64Array(rows);
  const lowest = new Float64Array(rows).fill(Infinity);
  const highest = new Float64Array(rows).fill(-Infinity);
  for (let k = 0; k < rows; k++) {
    for (let a = 0; a + k < rows; a++) {
      const product = products[a * rows + a + k];
      mean[k] += product / (rows - k);
      lowest[k] = Math.min(lowest[k], product);
      highest[k] = Math.max(highest[k], product);
    }
  }
  return { similarity, collisions, mean, lowest, highest };
}

/** Return the largest difference between M_k PE(pos) and PE(pos + k). */
export function rotationError(turns: Float64Array, pos: number, k: number): number {
  let worst = 0;
  for (const turn of turns) {
    const [sin, cos] = [Math.sin(turn * pos), Math.cos(turn * pos)];
    const [sinK, cosK] = [Math.sin(turn * k), Math.cos(turn * k)];
    worst = Math.max(
      worst,
      Math.abs(cosK * sin + sinK * cos - Math.sin(turn * (pos + k))),
      Math.abs(-sinK * sin + cosK * cos - Math.cos(turn * (pos + k))),
    );
  }
  return worst;
}
