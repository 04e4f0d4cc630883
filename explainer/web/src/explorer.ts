/** The explorer of positional encodings. Section 3.5. */

import { axisBottom, axisLeft } from "d3-axis";
import { scaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { area, line } from "d3-shape";
import { paint } from "./colours";
import { choices, slider } from "./controls";
import { brief, formula, h, hideTip, rich, s, showTip, shown } from "./dom";
import { legend, numberTable } from "./pictures";
import {
  CANDIDATES,
  type Candidate,
  type Code,
  bitLength,
  compare,
  encode,
  frequencies,
  rotationError,
  widthOf,
} from "./positions";
import { clamp, state, writeLink } from "./state";
import { text } from "./text";

const words = text.positions;
const MOST = { base: 6, d: 128, n: 128 };
const MOST_CLOCKS = 12;
const NUM_BITS = 5;
const FIRST = 4;

/** Return a base of three digits for a place of its slider. */
const baseOf = (exponent: number) => Number((10 ** exponent).toPrecision(3));

/** Return the section, and functions that draw it and that set its controls from the state. */
export function positionsSection() {
  const candidate = choices(
    words.candidate,
    "code",
    CANDIDATES.map((value) => ({ value, label: words.candidates[value] })),
    state.code,
    (value) => change({ code: value }),
  );
  const sliders = {
    base: slider(
      words.controls.base,
      "base",
      [0, MOST.base, 0.05],
      4,
      (value) => brief(baseOf(value)),
      (value) => change({ base: baseOf(value) }),
    ),
    d: slider(words.controls.d, "d", [2, MOST.d, 2], state.d, String, (d) => change({ d })),
    n: slider(words.controls.n, "n", [FIRST, MOST.n, 1], state.n, String, (n) => change({ n })),
    k: slider(words.controls.k, "k", [1, MOST.n - 1, 1], state.k, String, (k) => change({ k })),
    pos: slider(words.controls.pos, "pos", [0, MOST.n - 1, 1], state.pos, String, (pos) =>
      change({ pos }),
    ),
  };

  let isWaiting = false;
  function change(values: Partial<typeof state>) {
    Object.assign(state, values);
    settle();
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      draw();
      writeLink();
    });
  }

  /** Bring the state into its bounds, and the controls to the state. */
  function settle() {
    if (!CANDIDATES.includes(state.code as Candidate)) state.code = "sinusoidal";
    state.base = clamp(state.base, 1, 10 ** MOST.base);
    state.d = 2 * Math.round(clamp(state.d, 2, MOST.d) / 2);
    state.n = Math.round(clamp(state.n, FIRST, MOST.n));
    state.k = Math.round(clamp(state.k, 1, state.n - 1));
    state.pos = Math.round(clamp(state.pos, 0, state.n - 1));
    candidate.set(state.code);
    sliders.base.set(Math.log10(state.base));
    sliders.d.set(state.d);
    sliders.n.set(state.n);
    sliders.k.set(state.k, state.n - 1);
    sliders.pos.set(state.pos, state.n - 1);
  }

  // each picture has its place; a frame fills it anew
  const formulaPlace = h("div", { class: "code-formula" });
  const verdict = h("p", { class: "verdict" });
  const note = h("p", { class: "note" });
  const heatCanvas = h("canvas", { class: "cells" });
  const heatFrame = h("div", { class: "frame" });
  const heatLegend = h("div");
  const heatSays = h("p", { class: "says" });
  const similarityCanvas = h("canvas", { class: "cells" });
  const marks = h("canvas", { class: "cells is-over" });
  const similaritySays = h("p", { class: "says" });
  const similarityLegend = h("div");
  const dotPlace = s("svg", { class: "chart", role: "img", "aria-label": words.dot.label });
  const dotSays = h("p", { class: "says" });
  const clocks = h("div");
  const clocksTitle = h("h4");
  const clocksSays = h("p", { class: "says" });
  const clocksFormula = formula(words.clocks.equation);
  const bitsPlace = s("svg", { class: "chart", role: "img" });
  const bitsSays = h("p", { class: "says" });
  let code: Code = { rows: 0, columns: 0, data: new Float32Array() };
  let drawnFormula = "";
  let similarities: Float32Array = new Float32Array();
  let dots: { mean: Float64Array } = { mean: new Float64Array() };
  const places = { dotWidth: 0, bitsWidth: 0 };

  const numbers = h("details", { "data-box": "positions" }, h("summary", {}, words.numbersOf));
  const fillNumbers = () => {
    if (!numbers.open) return;
    const head = [words.controls.pos, ...Array.from({ length: code.columns }, (_, i) => String(i))];
    const rows = Array.from({ length: code.rows }, (_, pos) => ({
      name: String(pos),
      cells: Array.from(code.data.subarray(pos * code.columns, (pos + 1) * code.columns)),
    }));
    numbers.lastElementChild!.matches(".numbers") && numbers.lastElementChild!.remove();
    numbers.append(numberTable(words.heatmap.title, head, rows));
  };
  numbers.addEventListener("toggle", () => {
    const rest = state.open.filter((one) => one !== "positions");
    state.open = numbers.open ? [...rest, "positions"] : rest;
    fillNumbers();
    writeLink();
  });
  if (state.open.includes("positions")) numbers.open = true;

  const cellAt = (canvas: HTMLElement, event: PointerEvent, rows: number, columns: number) => {
    const box = canvas.getBoundingClientRect();
    return [
      clamp(Math.floor(((event.clientY - box.top) / box.height) * rows), 0, rows - 1),
      clamp(Math.floor(((event.clientX - box.left) / box.width) * columns), 0, columns - 1),
    ];
  };
  heatCanvas.addEventListener("pointermove", (event) => {
    const [row, column] = cellAt(heatCanvas, event, code.rows, code.columns);
    const name = `${words.controls.pos} ${row}`;
    const value = shown(code.data[row * code.columns + column]);
    showTip(text.cell(name, `${text.feature} ${column}`, value), event);
  });
  marks.addEventListener("pointermove", (event) => {
    const [row, column] = cellAt(marks, event, code.rows, code.rows);
    const value = shown(similarities[row * code.rows + column]);
    showTip(text.cell(String(row), String(column), value), event);
  });
  dotPlace.addEventListener("pointermove", (event) => {
    const box = dotPlace.getBoundingClientRect();
    const share = (event.clientX - box.left - 44) / (box.width - 54);
    const distance = Math.round(clamp(share, 0, 1) * (code.rows - 1));
    showTip(words.dot.value(distance, brief(dots.mean[distance])), event);
  });
  for (const one of [heatCanvas, marks, dotPlace]) one.addEventListener("pointerleave", hideTip);

  const part = (title: string | HTMLElement, says: HTMLElement, ...pictures: Node[]) =>
    h(
      "article",
      { class: "card" },
      typeof title === "string" ? h("h4", {}, title) : title,
      says,
      ...pictures,
    );

  // a picture with a row for each position
  const framed = (label: string, columns: string, ...layers: Element[]) =>
    h(
      "div",
      { class: "axis-frame" },
      h("span", { class: "axis-y" }, words.heatmap.rows),
      h("div", { class: "heat-body is-square", role: "img", "aria-label": label }, ...layers),
      h("span", { class: "axis-x" }, columns),
    );

  const element = h(
    "section",
    { id: "positions", class: "view", "aria-labelledby": "positions-title" },
    h("h2", { id: "positions-title" }, words.title),
    h("p", { class: "lead" }, words.lead),
    h(
      "div",
      { class: "bar-controls is-positions" },
      candidate.element,
      h("div", { class: "sliders" }, ...Object.values(sliders).map((one) => one.element)),
    ),
    h("div", { class: "code" }, formulaPlace, h("div", {}, verdict, note)),
    h(
      "div",
      { class: "grid" },
      part(
        words.heatmap.title,
        heatSays,
        framed(words.heatmap.label, words.heatmap.columns, heatCanvas, heatFrame),
        heatLegend,
        numbers,
      ),
      part(
        words.similarity.title,
        similaritySays,
        framed(words.similarity.label, words.heatmap.rows, similarityCanvas, marks),
        similarityLegend,
      ),
      part(words.dot.title, dotSays, dotPlace),
      h("article", { class: "card" }, clocksTitle, clocksSays, clocks, clocksFormula),
      (() => {
        const wide = part(
          words.bits.title,
          h("p", { class: "says" }, words.bits.says),
          bitsPlace,
          bitsSays,
        );
        wide.classList.add("is-wide");
        return wide;
      })(),
    ),
  );

  function drawDot(mean: Float64Array, lowest: Float64Array, highest: Float64Array) {
    const width = places.dotWidth;
    const height = 300;
    const n = mean.length;
    const low = Math.min(0, ...lowest);
    const high = Math.max(...highest);
    const x = scaleLinear([0, n - 1], [44, width - 10]);
    const y = scaleLinear([low, high || 1], [height - 34, 10]).nice();
    const svg = select(dotPlace).attr("viewBox", `0 0 ${width} ${height}`);
    svg.selectAll("*").remove();
    svg
      .append("path")
      .attr("class", "band")
      .attr(
        "d",
        area<number>()
          .x((_, k) => x(k))
          .y0((_, k) => y(lowest[k]))
          .y1((_, k) => y(highest[k]))(Array.from(mean)),
      );
    svg
      .append("path")
      .attr("class", "curve")
      .attr(
        "d",
        line<number>(
          (_, k) => x(k),
          (value) => y(value),
        )(Array.from(mean)),
      );
    svg
      .append("line")
      .attr("class", "rule")
      .attr("x1", x(state.k))
      .attr("x2", x(state.k))
      .attr("y1", 10)
      .attr("y2", height - 34);
    svg
      .append("circle")
      .attr("class", "dot")
      .attr("cx", x(state.k))
      .attr("cy", y(mean[state.k]))
      .attr("r", 5);
    svg
      .append("g")
      .attr("class", "axis")
      .attr("transform", `translate(0,${height - 34})`)
      .call(axisBottom(x).ticks(Math.min(8, width / 60)));
    svg
      .append("g")
      .attr("class", "axis")
      .attr("transform", "translate(44,0)")
      .call(axisLeft(y).ticks(5));
    svg
      .append("text")
      .attr("class", "axis-title")
      .attr("x", (width + 34) / 2)
      .attr("y", height - 4)
      .attr("text-anchor", "middle")
      .text(words.dot.axis);
  }

  function drawClocks(turns: Float64Array) {
    const count = Math.min(MOST_CLOCKS, turns.length);
    const pairs = new Set(
      Array.from({ length: count }, (_, i) =>
        count === 1 ? 0 : Math.round((i * (turns.length - 1)) / (count - 1)),
      ),
    );
    const hand = (angle: number, length: number) =>
      `M0,0L${(length * Math.sin(angle)).toFixed(2)},${(-length * Math.cos(angle)).toFixed(2)}`;
    clocks.replaceChildren(
      ...[...pairs].map((pair) => {
        const from = turns[pair] * state.pos;
        const to = turns[pair] * (state.pos + state.k);
        const degrees = brief(Number((((to - from) * 180) / Math.PI).toPrecision(3)));
        const isWhole = to - from >= 2 * Math.PI;
        const isLarge = to - from > Math.PI ? 1 : 0;
        const point = (angle: number) =>
          `${(12 * Math.sin(angle)).toFixed(2)},${(-12 * Math.cos(angle)).toFixed(2)}`;
        return h(
          "div",
          { class: "clock", role: "img", "aria-label": words.clocks.label(pair, degrees) },
          s(
            "svg",
            { viewBox: "-32 -32 64 64", "aria-hidden": "true" },
            s("circle", { class: "clock-face", r: 29 }),
            isWhole
              ? s("circle", { class: "clock-arc", r: 12 })
              : s("path", {
                  class: "clock-arc",
                  d: `M${point(from)}A12,12 0 ${isLarge} 1 ${point(to)}`,
                }),
            s("path", { class: "clock-hand is-later", d: hand(to, 26) }),
            s("path", { class: "clock-hand", d: hand(from, 26) }),
            s("circle", { class: "clock-pin", r: 2.5 }),
          ),
          h("span", {}, words.clocks.pair(pair)),
          h("b", {}, words.clocks.turn(degrees)),
        );
      }),
    );
  }

  /** Draw the code of each position against the code k positions later. */
  function drawSuccessors(kind: "integer" | "fraction" | "sine" | "learned") {
    const { title, says } = words.clocks.others[kind];
    clocksTitle.textContent = title(state.k);
    clocksSays.textContent = says;
    const width = places.dotWidth;
    const height = 300;
    const { data, rows, columns } = code;
    const isSigned = kind === "sine" || kind === "learned";
    const range = isSigned ? [-1, 1] : [0, kind === "integer" ? rows - 1 : 1];
    const x = scaleLinear(range, [44, width - 12]);
    const y = scaleLinear(range, [height - 34, 12]);
    const svg = s("svg", {
      class: "chart",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": words.clocks.successors,
    });
    const place = select(svg);
    place
      .append("g")
      .attr("class", "axis")
      .attr("transform", `translate(0,${height - 34})`)
      .call(axisBottom(x).ticks(5));
    place
      .append("g")
      .attr("class", "axis")
      .attr("transform", "translate(44,0)")
      .call(axisLeft(y).ticks(5));
    const name = (text: string, left: number, top: number, anchor: string) =>
      place
        .append("text")
        .attr("class", "axis-title")
        .attr("x", left)
        .attr("y", top)
        .attr("text-anchor", anchor)
        .text(text);
    name(words.clocks.across, (width + 34) / 2, height - 4, "middle");
    name(words.clocks.upward, 50, 14, "start");
    for (let one = 0; one + state.k < rows; one++)
      place
        .append("circle")
        .attr("class", one === state.pos ? "successor is-here" : "successor")
        .attr("cx", x(data[one * columns]))
        .attr("cy", y(data[(one + state.k) * columns]))
        .attr("r", one === state.pos ? 6 : 4);
    clocks.replaceChildren(svg);
  }

  /** Draw the bits of a position and of the one k later. */
  function drawFlips() {
    const { title, says } = words.clocks.others.binary;
    const bits = Math.max(bitLength(code.rows - 1), bitLength(state.pos + state.k));
    const bitsOf = (pos: number) => pos.toString(2).padStart(bits, "0");
    const [from, to] = [bitsOf(state.pos), bitsOf(state.pos + state.k)];
    const flipped = [...from].filter((bit, index) => bit !== to[index]).length;
    clocksTitle.textContent = title(state.k);
    clocksSays.textContent = says(flipped);
    const row = (pos: number, own: string, other: string) =>
      h(
        "div",
        { class: "bit-row" },
        h("span", {}, words.clocks.here(pos)),
        ...[...own].map((bit, index) =>
          h("b", { class: bit === other[index] ? "" : "is-flipped" }, bit),
        ),
      );
    const counts = Array.from({ length: code.rows - state.k }, (_, one) => {
      const changed = (one ^ (one + state.k)).toString(2);
      return changed.replaceAll("0", "").length;
    });
    const width = places.dotWidth;
    const height = 190;
    const x = scaleLinear([-0.5, counts.length - 0.5], [44, width - 12]);
    const y = scaleLinear([0, Math.max(...counts)], [height - 34, 10]);
    const svg = s("svg", {
      class: "chart",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": words.clocks.others.binary.bars,
    });
    const place = select(svg);
    counts.forEach((count, one) =>
      place
        .append("rect")
        .attr("class", one === state.pos ? "successor is-here" : "successor")
        .attr("x", x(one - 0.4))
        .attr("width", x(0.4) - x(-0.4))
        .attr("y", y(count))
        .attr("height", y(0) - y(count)),
    );
    place
      .append("g")
      .attr("class", "axis")
      .attr("transform", `translate(0,${height - 34})`)
      .call(axisBottom(x).ticks(6));
    const ticks = Math.min(5, Math.max(...counts));
    place
      .append("g")
      .attr("class", "axis")
      .attr("transform", "translate(44,0)")
      .call(axisLeft(y).ticks(ticks));
    place
      .append("text")
      .attr("class", "axis-title")
      .attr("x", (width + 34) / 2)
      .attr("y", height - 4)
      .attr("text-anchor", "middle")
      .text(words.clocks.others.binary.bars);
    clocks.replaceChildren(
      h("div", { class: "bit-rows" }, row(state.pos, from, to), row(state.pos + state.k, to, from)),
      svg,
    );
  }

  function drawBits() {
    const width = places.bitsWidth;
    const numPositions = 2 ** NUM_BITS;
    const isNarrow = width < 500;
    const rowHeight = isNarrow ? 58 : 46;
    const height = NUM_BITS * rowHeight + 30;
    const left = isNarrow ? 4 : 112;
    const x = scaleLinear([-0.5, numPositions - 0.5], [left, width - 8]);
    const svg = select(bitsPlace).attr("viewBox", `0 0 ${width} ${height}`);
    svg.selectAll("*").remove();
    const pos = state.pos % numPositions;
    svg
      .append("rect")
      .attr("class", "column")
      .attr("x", x(pos - 0.5))
      .attr("width", x(1) - x(0))
      .attr("y", 0)
      .attr("height", height - 24);
    for (let bit = 0; bit < NUM_BITS; bit++) {
      const period = 2 ** (bit + 1);
      const y = scaleLinear([-1, 1], [(bit + 1) * rowHeight - 8, (bit + 1) * rowHeight - 34]);
      const corners: [number, number][] = [];
      for (let one = 0; one < numPositions; one++) {
        const value = (one >> bit) & 1 ? 1 : -1;
        corners.push([one - 0.5, value], [one + 0.5, value]);
      }
      const wave = Array.from({ length: 8 * numPositions + 1 }, (_, i) => i / 8 - 0.5);
      svg
        .append("path")
        .attr("class", "bit")
        .attr(
          "d",
          line<[number, number]>(
            (one) => x(one[0]),
            (one) => y(one[1]),
          )(corners),
        );
      svg
        .append("path")
        .attr("class", "curve")
        .attr(
          "d",
          line<number>(
            (one) => x(one),
            (one) => y(-Math.sin((2 * Math.PI * (one + 0.5)) / period)),
          )(wave),
        );
      svg
        .append("text")
        .attr("class", "axis-title")
        .attr("x", isNarrow ? left : 0)
        .attr("y", isNarrow ? bit * rowHeight + 14 : y(0) + 4)
        .text(words.bits.bit(bit, period));
    }
    const ticks = isNarrow ? 8 : 16;
    svg
      .append("g")
      .attr("class", "axis")
      .attr("transform", `translate(0,${height - 24})`)
      .call(axisBottom(x).ticks(ticks));
    const bits = pos.toString(2).padStart(NUM_BITS, "0");
    bitsPlace.setAttribute("aria-label", words.bits.label(pos, bits));
    bitsSays.textContent = words.bits.value(pos, bits);
  }

  /** Draw every picture for the state; one frame. */
  function draw() {
    const began = performance.now();
    const kind = state.code as Candidate;
    const { n, d, base, k, pos } = state;
    if (drawnFormula !== kind) {
      formulaPlace.replaceChildren(formula(words.formulas[kind]));
      drawnFormula = kind;
    }
    verdict.textContent = words.verdicts[kind];
    const ignored = [
      kind !== "sinusoidal" && words.controls.base,
      widthOf(kind, n, d) === 1 && words.controls.d,
    ].filter((name): name is string => Boolean(name));
    const bits = bitLength(n - 1);
    const widened = kind === "binary" && d < bits ? `${words.widened(bits)} ` : "";
    note.textContent = widened + (ignored.length ? words.ignored(ignored) : "");

    code = encode(kind, n, d, base);
    const largest = code.data.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    const range: [number, number] = [-Math.max(1, largest), Math.max(1, largest)];
    paint(heatCanvas, code.data, code.columns, "values", range);
    heatFrame.style.top = `${(pos / n) * 100}%`;
    heatFrame.style.height = `${100 / n}%`;
    heatLegend.replaceChildren(legend("values", range));
    heatSays.textContent = kind === "sinusoidal" ? words.heatmap.says : words.heatmap.saysOther;

    const compared = compare(code);
    similarities = compared.similarity;
    paint(similarityCanvas, similarities, n, "similarity", [-1, 1]);
    if (
      !similarityLegend.firstChild ||
      similarityLegend.dataset.theme !== document.documentElement.dataset.theme
    ) {
      similarityLegend.replaceChildren(legend("similarity", [-1, 1]));
      similarityLegend.dataset.theme = document.documentElement.dataset.theme ?? "";
    }
    const { collisions } = compared;
    const size = 4;
    marks.width = n * size;
    marks.height = n * size;
    const context = marks.getContext("2d")!;
    context.fillStyle = getComputedStyle(marks).color;
    for (const [a, b] of collisions) {
      context.fillRect(b * size + 1, a * size + 1, size - 2, size - 2);
      context.fillRect(a * size + 1, b * size + 1, size - 2, size - 2);
    }
    const [first] = collisions;
    similaritySays.textContent =
      words.similarity.says(collisions.length, first ? words.similarity.first(...first) : "") +
      (code.columns === 1 ? words.similarity.oneFeature : "");

    dots = compared;
    const { mean, lowest, highest } = compared;
    const spread = mean.reduce((most, _, one) => Math.max(most, highest[one] - lowest[one]), 0);
    const scale = Math.max(...mean.map(Math.abs), 1e-9);
    dotSays.textContent = spread <= 1e-4 * scale ? words.dot.says.fixed : words.dot.says.varies;
    drawDot(mean, lowest, highest);

    const turns = frequencies(kind, d, base);
    clocksTitle.textContent = words.clocks.title(k);
    clocksFormula.hidden = !turns.length;
    clocks.classList.toggle("is-clocks", turns.length > 0);
    if (turns.length) {
      drawClocks(turns);
      clocksSays.replaceChildren(rich(words.clocks.says(brief(rotationError(turns, pos, k)))));
    } else if (kind === "binary") drawFlips();
    else drawSuccessors(kind as "integer" | "fraction" | "sine" | "learned");
    drawBits();
    fillNumbers();
    performance.measure("positions", { start: began, end: performance.now() });
  }

  const measure = () => {
    const [dot, bits] = [dotPlace.clientWidth, bitsPlace.clientWidth];
    if (dot === places.dotWidth && bits === places.bitsWidth) return;
    places.dotWidth = dot;
    places.bitsWidth = bits;
    if (dot && bits) draw();
  };
  new ResizeObserver(measure).observe(dotPlace);
  settle();
  return { element, draw: () => places.dotWidth && draw(), settle };
}
