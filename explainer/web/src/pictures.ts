/** Pictures of tables of numbers: heatmaps, matrices, lines between words, and tables. */

import { type Kind, gradient, paint, symmetric } from "./colours";
import { type Child, brief, formula, h, hideTip, s, showTip, shown } from "./dom";
import type { Table } from "./model";
import { state, writeLink } from "./state";
import { text } from "./text";

export interface HeatSettings {
  table: Table;
  rows: string[];
  /** Names of the columns; features without names are numbered. */
  columns?: string[];
  kind?: Kind;
  range?: [number, number];
  label: string;
  /** Row in a frame, and the last row that is computed already. */
  current?: number;
  last?: number;
  /** Whether a cell is hidden by a mask. */
  isHidden?: (row: number, column: number) => boolean;
}

/** Return a heatmap with the names of its rows, and with those of its columns if it has names. */
export function heatmap(settings: HeatSettings): HTMLElement {
  const { table, rows, columns, kind = "values", label, isHidden } = settings;
  const [height, width] = table.dims;
  let data: ArrayLike<number> = table.data;
  if (isHidden) {
    const copy = Float32Array.from(table.data);
    for (let row = 0; row < height; row++)
      for (let column = 0; column < width; column++)
        if (isHidden(row, column)) copy[row * width + column] = NaN;
    data = copy;
  }
  const range = settings.range ?? symmetric(data);
  const canvas = h("canvas", { class: "cells" });
  paint(canvas, data, width, kind, range);
  const rowHeight = columns ? 22 : Math.min(16, Math.max(8, 320 / height));
  const every = Math.ceil(11 / rowHeight);
  const body = h(
    "div",
    { class: isHidden ? "heat-body is-masked" : "heat-body" },
    canvas,
    settings.last !== undefined &&
      settings.last < height - 1 &&
      h("div", {
        class: "pale",
        style: `top:${((settings.last + 1) / height) * 100}%`,
      }),
    settings.current !== undefined &&
      h("div", {
        class: "frame",
        style: `top:${(settings.current / height) * 100}%;height:${100 / height}%`,
      }),
  );
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * height);
    const column = Math.floor(((event.clientX - box.left) / box.width) * width);
    if (row < 0 || row >= height || column < 0 || column >= width) return;
    const value = data[row * width + column];
    const name = columns?.[column] ?? `${text.feature} ${column}`;
    const words = Number.isNaN(value) ? text.hidden : shown(value);
    showTip(text.cell(rows[row], name, words), event);
  });
  canvas.addEventListener("pointerleave", hideTip);
  const names = h("div", { class: "heat-rows", "aria-hidden": "true" });
  rows
    .slice(0, height)
    .forEach((name, row) => names.append(h("span", {}, row % every === 0 ? name : "")));
  const style = `--row:${rowHeight}px;--rows:${height};--columns:${width}`;
  return h(
    "div",
    { class: columns ? "heat is-matrix" : "heat", role: "img", "aria-label": label, style },
    columns &&
      h(
        "div",
        { class: "heat-columns", "aria-hidden": "true" },
        ...columns.map((name) => h("span", {}, name)),
      ),
    names,
    body,
    legend(kind, range),
  );
}

/** Return the colour scale of a heatmap. */
export function legend(kind: Kind, [lowest, highest]: [number, number]): HTMLElement {
  return h(
    "div",
    { class: "legend", "aria-hidden": "true" },
    h("span", {}, brief(Number(lowest.toPrecision(2)))),
    h("i", { style: `background:${gradient(kind)}` }),
    h("span", {}, brief(Number(highest.toPrecision(2)))),
  );
}

/** Return a table of numbers with names of rows and columns. */
export function numberTable(
  title: string,
  head: string[],
  rows: { name: string; cells: (number | string)[] }[],
): HTMLElement {
  return h(
    "div",
    { class: "numbers", tabindex: 0, role: "region", "aria-label": text.tableOf(title) },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...head.map((name) => h("th", { scope: "col" }, name)))),
      h(
        "tbody",
        {},
        ...rows.map(({ name, cells }) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, name),
            ...cells.map((cell) => h("td", {}, typeof cell === "number" ? shown(cell) : cell)),
          ),
        ),
      ),
    ),
  );
}

/** Return the number table of a heatmap. */
export function numbersOf(title: string, settings: HeatSettings): HTMLElement {
  const { table, rows, columns, isHidden } = settings;
  const [height, width] = table.dims;
  const shownRows = Math.min(height, (settings.last ?? height - 1) + 1);
  const head = [text.token, ...Array.from({ length: width }, (_, i) => columns?.[i] ?? String(i))];
  return numberTable(
    title,
    head,
    rows.slice(0, shownRows).map((name, row) => ({
      name,
      cells: Array.from({ length: width }, (_, column) =>
        isHidden?.(row, column) ? -Infinity : table.data[row * width + column],
      ),
    })),
  );
}

export interface BoxSettings {
  /** Name of the box, in the link too. */
  name: string;
  title: string;
  equation: string;
  picture: Child;
  shape?: string;
  numbers?: () => Child;
  summary?: string;
  wide?: boolean;
}

/** Return a picture with its title, which opens to the equation and the numbers. */
export function box(settings: BoxSettings): HTMLElement {
  const { name, title, equation, picture, shape, numbers, summary } = settings;
  const details = h("details", { "data-key": `open-${name}` });
  const fillDetails = () => {
    if (details.childElementCount === 1) {
      details.append(formula(equation));
      const table = numbers?.();
      if (table) details.append(table);
    }
  };
  details.append(
    h(
      "summary",
      { "data-key": `summary-${name}` },
      summary ?? text.numbers,
      h("span", { class: "sr" }, `: ${title}`),
    ),
  );
  if (state.open.includes(name)) {
    details.open = true;
    fillDetails();
  }
  details.addEventListener("toggle", () => {
    const rest = state.open.filter((one) => one !== name);
    state.open = details.open ? [...rest, name] : rest;
    if (details.open) fillDetails();
    writeLink();
  });
  return h(
    "figure",
    { class: settings.wide ? "box is-wide" : "box", "data-box": name },
    h("figcaption", {}, title, shape && h("span", { class: "shape" }, shape)),
    picture,
    details,
  );
}

/** Return a heatmap in a box. */
export function heatBox(name: string, title: string, equation: string, settings: HeatSettings) {
  return box({
    name,
    title,
    equation,
    picture: heatmap(settings),
    shape: text.shape(settings.table.dims[0], settings.table.dims[1]),
    numbers: () => numbersOf(title, settings),
  });
}

export interface LineSettings {
  weights: Table;
  queries: string[];
  keys: string[];
  queryTitle: string;
  keyTitle: string;
  /** Query whose lines are shown when no word is pointed at; -1 for all. */
  chosen: number;
  last?: number;
  /** The word that is written after each query, in the decoder. */
  written?: string[];
  onChoose: (query: number) => void;
}

/** Return two columns of words with a line for each weight. */
export function attentionLines(settings: LineSettings): HTMLElement {
  const { weights, queries, keys, chosen } = settings;
  const [numQueries, numKeys] = weights.dims;
  const last = settings.last ?? numQueries - 1;
  const rowHeight = 26;
  const rows = Math.max(numQueries, numKeys);
  const height = rows * rowHeight;
  const offset = (count: number) => ((rows - count) / 2) * rowHeight + rowHeight / 2;
  const svg = s("svg", {
    viewBox: `0 0 100 ${height}`,
    preserveAspectRatio: "none",
    style: `height:${height}px`,
    "aria-hidden": "true",
  });
  const lines: { query: number; key: number; line: SVGElement; weight: number }[] = [];
  for (let query = 0; query <= last; query++)
    for (let key = 0; key < numKeys; key++) {
      const weight = weights.data[query * numKeys + key];
      if (weight < 0.01) continue;
      const [from, to] = [
        offset(numQueries) + query * rowHeight,
        offset(numKeys) + key * rowHeight,
      ];
      const line = s("path", { d: `M0,${from}C45,${from} 55,${to} 100,${to}` });
      lines.push({ query, key, line, weight });
      svg.append(line);
    }
  const said = h("p", { class: "said", "aria-live": "polite" });
  const queryButtons: HTMLButtonElement[] = [];
  const keyButtons: HTMLButtonElement[] = [];
  const show = (query: number, key: number) => {
    for (const one of lines) {
      const isOn = (query < 0 || one.query === query) && (key < 0 || one.key === key);
      const isAll = query < 0 && key < 0;
      one.line.setAttribute("stroke-width", String((isAll ? 3 : 6) * one.weight + 0.4));
      one.line.setAttribute("opacity", isOn ? String(0.15 + 0.85 * one.weight) : "0.04");
    }
    const parts = (mine: (typeof lines)[number][]) =>
      mine
        .filter((one) => one.weight >= 0.05)
        .sort((a, b) => b.weight - a.weight)
        .slice(0, 4);
    const share = (weight: number) => `${Math.round(weight * 100)}%`;
    queryButtons.forEach((button, index) => button.classList.toggle("is-on", index === query));
    keyButtons.forEach((button, index) => {
      button.classList.toggle("is-on", index === key);
      const weight = query >= 0 ? weights.data[query * numKeys + index] : 0;
      button.style.setProperty("--share", share(key < 0 ? weight : 0));
    });
    queryButtons.forEach((button, index) => {
      const weight = key >= 0 && index <= last ? weights.data[index * numKeys + key] : 0;
      button.style.setProperty("--share", share(query < 0 ? weight : 0));
    });
    if (query >= 0) {
      const mine = parts(lines.filter((one) => one.query === query));
      const listed = mine.map((one) => text.figure.lines.part(share(one.weight), keys[one.key]));
      said.textContent = text.figure.lines.reads(
        queries[query],
        listed.join(", "),
        settings.written?.[query],
      );
    } else if (key >= 0) {
      const mine = parts(lines.filter((one) => one.key === key));
      const listed = mine.map((one) => text.figure.lines.by(queries[one.query], share(one.weight)));
      said.textContent = text.figure.lines.isRead(keys[key], listed.join(", "));
    } else said.textContent = "\u00a0";
  };
  const rest = () => show(chosen, -1);
  const column = (names: string[], count: number, isQuery: boolean) =>
    h(
      "div",
      {
        class: isQuery ? "words is-queries" : "words",
        style: `padding-top:${offset(count) - rowHeight / 2}px`,
      },
      ...names.slice(0, count).map((name, index) => {
        const isPale = isQuery && index > last;
        const point = () => {
          if (!isPale) show(isQuery ? index : -1, isQuery ? -1 : index);
        };
        const button = h(
          "button",
          {
            type: "button",
            "data-key": `${isQuery ? "q" : "k"}${index}`,
            disabled: isPale,
            pointerenter: point,
            pointerleave: rest,
            focus: point,
            blur: rest,
            click: () => (isQuery ? settings.onChoose(index) : point()),
            ...(isQuery ? { "aria-pressed": String(index === chosen) } : {}),
          },
          name,
        );
        (isQuery ? queryButtons : keyButtons).push(button);
        return button;
      }),
    );
  const picture = h(
    "div",
    { class: "lines" },
    h("span", { class: "lines-title" }, settings.queryTitle),
    h("span", { class: "lines-title is-right" }, settings.keyTitle),
    column(queries, numQueries, true),
    svg,
    column(keys, numKeys, false),
  );
  rest();
  return h("div", {}, picture, said);
}

/** Return a small matrix of weights for each head, which chooses the head. */
export function smallHeads(
  weights: Table,
  numHeads: number,
  chosen: number,
  key: string,
  onChoose: (head: number) => void,
): HTMLElement {
  const [queries, keys] = weights.dims.slice(-2);
  return h(
    "div",
    { class: "heads", role: "group", "aria-label": text.figure.lines.heads },
    ...Array.from({ length: numHeads }, (_, head) => {
      const canvas = h("canvas", { class: "cells" });
      const from = head * queries * keys;
      const data = weights.data.subarray(from, from + queries * keys);
      paint(canvas, data, keys, "weights", [0, 1]);
      return h(
        "button",
        {
          type: "button",
          class: "small-head",
          "data-key": `${key}-head-${head}`,
          "aria-label": text.headLabel(head + 1),
          "aria-pressed": String(head === chosen),
          click: () => onChoose(head),
        },
        canvas,
        h("span", {}, text.headName(head + 1)),
      );
    }),
  );
}

/** Replace the content of an element; the element that had the focus keeps it. */
export function refill(element: HTMLElement, ...children: Child[]) {
  const active = document.activeElement as HTMLElement | null;
  const card = active?.closest<HTMLElement>("[data-card]")?.dataset.card;
  const key = element.contains(active) ? active?.dataset.key : undefined;
  element.replaceChildren(...children.filter((child): child is Node | string => Boolean(child)));
  if (key) {
    const place = card ? element.querySelector(`[data-card="${card}"]`) : element;
    place?.querySelector<HTMLElement>(`[data-key="${key}"]`)?.focus({ preventScroll: true });
  }
}
