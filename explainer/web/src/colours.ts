/** One colour map for each kind of number: blue to red, viridis, and orange to purple. */

import { scaleLinear } from "d3-scale";
import { interpolateViridis } from "d3-scale-chromatic";

export type Kind = "values" | "weights" | "similarity";
type Rgb = [number, number, number];

const STOPS = {
  light: {
    values: ["#053061", "#4393c3", "#f7f7f7", "#d6604d", "#67001f"],
    similarity: ["#7f3b08", "#f1a340", "#f7f7f7", "#998ec3", "#2d004b"],
  },
  dark: {
    values: ["#a6d5ff", "#3f83bd", "#1c212b", "#c9573f", "#ffc2ac"],
    similarity: ["#ffd9a0", "#c27a20", "#1c212b", "#8573b8", "#ddd0ff"],
  },
};
const COUNT = 256;
const tables = new Map<string, Rgb[]>();

/** Return whether the page is dark now. */
export function isDark(): boolean {
  const theme = document.documentElement.dataset.theme;
  return theme === "dark" || (!theme && matchMedia("(prefers-color-scheme: dark)").matches);
}

function parse(colour: string): Rgb {
  if (colour.startsWith("#"))
    return [1, 3, 5].map((from) => parseInt(colour.slice(from, from + 2), 16)) as Rgb;
  return colour.match(/\d+/g)!.slice(0, 3).map(Number) as Rgb;
}

function tableOf(kind: Kind): Rgb[] {
  const name = `${kind} ${kind !== "weights" && isDark()}`;
  let table = tables.get(name);
  if (!table) {
    const stops = kind === "weights" ? [] : STOPS[isDark() ? "dark" : "light"][kind];
    const scale = scaleLinear<string>(
      stops.map((_, index) => index / (stops.length - 1)),
      stops,
    );
    const colour = kind === "weights" ? interpolateViridis : scale;
    table = Array.from({ length: COUNT }, (_, index) => parse(colour(index / (COUNT - 1))));
    tables.set(name, table);
  }
  return table;
}

/** Draw a table of numbers, one pixel for each; NaN stays transparent. */
export function paint(
  canvas: HTMLCanvasElement,
  data: ArrayLike<number>,
  columns: number,
  kind: Kind,
  [lowest, highest]: [number, number],
) {
  const rows = Math.floor(data.length / columns);
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(columns, rows);
  const table = tableOf(kind);
  const factor = (COUNT - 1) / (highest - lowest || 1);
  for (let index = 0; index < rows * columns; index++) {
    const value = data[index];
    if (Number.isNaN(value)) continue;
    const step = Math.round((value - lowest) * factor);
    const colour = table[Math.min(Math.max(step, 0), COUNT - 1)];
    image.data[4 * index] = colour[0];
    image.data[4 * index + 1] = colour[1];
    image.data[4 * index + 2] = colour[2];
    image.data[4 * index + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

/** Return a CSS gradient of a colour map. */
export function gradient(kind: Kind): string {
  const table = tableOf(kind);
  const stops = Array.from(
    { length: 9 },
    (_, index) => table[Math.round((index * (COUNT - 1)) / 8)],
  );
  return `linear-gradient(to right, ${stops.map((rgb) => `rgb(${rgb.join(" ")})`).join(", ")})`;
}

/** Return a range that is symmetric around 0 and holds all finite numbers. */
export function symmetric(data: ArrayLike<number>): [number, number] {
  let limit = 0;
  for (let index = 0; index < data.length; index++) {
    const size = Math.abs(data[index]);
    if (Number.isFinite(size) && size > limit) limit = size;
  }
  return [-(limit || 1), limit || 1];
}
