/** Figure 1, walked through with one sentence. */

import { choices, slider } from "./controls";
import { type Child, h, rich, shown } from "./dom";
import { figureMap } from "./map";
import { type Encoded, type Model, type Table, type Values, logSoftmax, matrixOf } from "./model";
import {
  attentionLines,
  box,
  heatBox,
  type HeatSettings,
  heatmap,
  type LineSettings,
  numberTable,
  numbersOf,
  refill,
  smallHeads,
} from "./pictures";
import { highest } from "./search";
import { clamp, state, writeLink } from "./state";
import { text } from "./text";

const words = text.figure;
const NUM_LIKELY = 10;

/** A sentence, its translation, and all values of both stacks. */
export interface Walk {
  encoded: Encoded;
  source: string[];
  /** Target tokens: the inputs of the decoder and the outputs of its steps. */
  inputs: number[];
  outputs: number[];
  values: Values;
}

const card = (name: string, title: string, says: string, ...children: Child[]) =>
  h(
    "article",
    { class: "card", id: name, "data-card": name, tabindex: -1 },
    h("h4", {}, title),
    h("p", { class: "says" }, rich(says)),
    ...children,
  );

const trio = (...children: Child[]) => h("div", { class: "trio" }, ...children);
const pair = (...children: Child[]) => h("div", { class: "pair" }, ...children);
const sign = (symbol: string) => h("span", { class: "sign", "aria-hidden": "true" }, symbol);

interface Rows {
  names: string[];
  current?: number;
  last?: number;
}

/** Return the cards of one attention. */
function attentionCards(
  id: "e" | "d" | "c",
  prefix: string,
  values: Values,
  queries: Rows,
  keys: string[],
  head: number,
  numHeads: number,
  setHead: (head: number) => void,
  before: Table,
  choose: Pick<LineSettings, "chosen" | "onChoose" | "written">,
): HTMLElement[] {
  const mode = id === "e" ? "self" : id === "d" ? "masked" : "cross";
  const kind = { e: words.encoder.attention, d: words.decoder.masked, c: words.decoder.cross }[id];
  const isCross = id === "c";
  const get = (part: string) => values[`${prefix}.${part}`];
  const rows = { rows: queries.names, current: queries.current, last: queries.last };
  const ofKeys = isCross ? { rows: keys } : rows;
  const { boxes, equations } = words.qkv;
  const isHidden = id === "d" ? (row: number, column: number) => column > row : undefined;
  const label = (title: string) => `${kind}, ${words.qkvLabel(title, head + 1)}`;
  const heat = (part: string, title: string, equation: string, side: object) =>
    heatBox(`${id}-${part}`, title, equation, {
      table: matrixOf(get(part), head),
      rows: [],
      label: label(title),
      ...side,
    } as HeatSettings);
  const scoreSettings: HeatSettings = {
    table: matrixOf(get("scores"), head),
    ...rows,
    columns: keys,
    label: label(words.scores.boxes.scores),
    isHidden,
  };
  const weightSettings: HeatSettings = {
    ...scoreSettings,
    table: matrixOf(get("weights"), head),
    kind: "weights",
    range: [0, 1],
    label: label(words.scores.boxes.weights),
    isHidden: undefined,
  };
  const withHead = `${kind}, ${words.headIn(head + 1)}`;
  return [
    card(
      `${id}-qkv`,
      words.qkv.title(withHead),
      words.qkv.says[isCross ? "cross" : "self"],
      trio(
        heat("query", boxes.query, isCross ? equations.crossQuery : equations.query, rows),
        heat("key", boxes.key, isCross ? equations.crossKey : equations.key, ofKeys),
        heat("value", boxes.value, isCross ? equations.crossValue : equations.value, ofKeys),
      ),
    ),
    card(
      `${id}-scores`,
      words.scores.title(withHead),
      words.scores.says[mode],
      pair(
        box({
          name: `${id}-scores`,
          title: words.scores.boxes.scores,
          equation:
            id === "d" ? words.scores.equations.maskedScores : words.scores.equations.scores,
          shape: words.scores.query,
          picture: heatmap(scoreSettings),
          numbers: () => numbersOf(words.scores.boxes.scores, scoreSettings),
        }),
        box({
          name: `${id}-weights`,
          title: words.scores.boxes.weights,
          equation: words.scores.equations.weights,
          shape: words.scores.query,
          picture: heatmap(weightSettings),
          numbers: () => numbersOf(words.scores.boxes.weights, weightSettings),
        }),
      ),
    ),
    card(
      `${id}-heads`,
      words.lines.title(withHead),
      queries.current === undefined ? words.lines.says : words.lines.saysStep,
      h(
        "div",
        { class: "lines-and-heads" },
        attentionLines({
          weights: matrixOf(get("weights"), head),
          queries: queries.names,
          keys,
          queryTitle: words.lines.query,
          keyTitle: words.lines.key,
          last: queries.last,
          ...choose,
        }),
        h(
          "div",
          {},
          h("p", { class: "small-title" }, words.lines.heads),
          smallHeads(get("weights"), numHeads, head, id, setHead),
        ),
      ),
    ),
    card(
      `${id}-output`,
      words.output.title(kind),
      words.output.says(numHeads),
      pair(
        heat("context", words.output.boxes.context, words.output.equations.context, rows),
        heatBox(`${id}-output`, words.output.boxes.output, words.output.equations.output, {
          table: matrixOf(get("output")),
          ...rows,
          label: label(words.output.boxes.output),
        }),
      ),
    ),
    normCard(`${id}-norm`, kind, before, get("output"), get("norm"), rows),
  ];
}

function normCard(
  id: string,
  kind: string,
  before: Table,
  sublayer: Table,
  after: Table,
  rows: { rows: string[]; current?: number; last?: number },
): HTMLElement {
  const { boxes, equations } = words.norm;
  const heat = (part: keyof typeof boxes, table: Table) =>
    heatBox(`${id}-${part}`, boxes[part], equations[part], {
      table: matrixOf(table),
      ...rows,
      label: `${kind}: ${boxes[part]}`,
    });
  return card(
    id,
    words.norm.title(kind),
    words.norm.says,
    trio(
      heat("before", before),
      sign("+"),
      heat("sublayer", sublayer),
      sign("→"),
      heat("norm", after),
    ),
  );
}

function feedForwardCards(
  id: "e" | "d",
  prefix: string,
  values: Values,
  before: Table,
  rows: { rows: string[]; current?: number; last?: number },
): HTMLElement[] {
  const inner = values[`${prefix}.inner`];
  const output = values[`${prefix}.output`];
  const { boxes, equations } = words.ff;
  const heat = (part: "inner" | "output", table: Table, wide: boolean) => {
    const made = heatBox(`${id}-ff-${part}`, boxes[part], equations[part], {
      table: matrixOf(table),
      ...rows,
      label: `${words.ff.title}: ${boxes[part]}`,
    });
    made.classList.toggle("is-wide", wide);
    return made;
  };
  return [
    card(
      `${id}-ff`,
      words.ff.title,
      words.ff.says(inner.dims[2], output.dims[2]),
      pair(heat("inner", inner, true), heat("output", output, true)),
    ),
    normCard(`${id}-ff-norm`, words.ff.kind, before, output, values[`${prefix}.norm`], rows),
  ];
}

function embeddingCard(id: string, stack: string, values: Values, rows: Rows, model: Model) {
  const { title, says, boxes, equations } = words.embeddings;
  const heat = (part: keyof typeof boxes) =>
    heatBox(`${id}-${part}`, boxes[part], equations[part], {
      table: matrixOf(values[`${stack}.${part}`]),
      rows: rows.names,
      current: rows.current,
      last: rows.last,
      label: `${title}: ${boxes[part]}`,
    });
  return card(
    id,
    title,
    says(model.about.d_model),
    trio(heat("embeddings"), sign("+"), heat("positions"), sign("="), heat("input")),
  );
}

/** Return the section, and functions that show a sentence in it and that draw it again. */
export function walkSection(model: Model) {
  const { about } = model;
  let walk: Walk | undefined;
  const source = h("div", { class: "cards" });
  const encoder = h("div", { class: "cards" });
  const decoder = h("div", { class: "cards" });

  const numbers = (count: number) =>
    Array.from({ length: count }, (_, i) => ({ value: String(i + 1), label: String(i + 1) }));
  const change = (name: "el" | "eh" | "dl" | "dh", draw: () => void) => (value: string) => {
    state[name] = Number(value);
    writeLink();
    draw();
  };
  const encoderLayer = choices(
    text.layer,
    "el",
    numbers(about.encoder_layers),
    "1",
    change("el", drawEncoder),
  );
  const encoderHead = choices(
    text.head,
    "eh",
    numbers(about.encoder_heads),
    "1",
    change("eh", drawEncoder),
  );
  const decoderLayer = choices(
    text.layer,
    "dl",
    numbers(about.decoder_layers),
    "1",
    change("dl", drawDecoder),
  );
  const decoderHead = choices(
    text.head,
    "dh",
    numbers(about.decoder_heads),
    "1",
    change("dh", drawDecoder),
  );

  const moveTo = (step: number) => {
    state.step = clamp(Math.round(step), 1, walk?.outputs.length ?? 1);
    writeLink();
    drawSoon();
  };
  let isWaiting = false;
  /** Draw the decoder in the next frame, once for all moves of the slider before it. */
  function drawSoon() {
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      drawDecoder();
    });
  }
  const stepSlider = slider(
    words.decoder.step,
    "step",
    [1, 1, 1],
    1,
    (step) => words.decoder.stepOf(step, walk?.outputs.length ?? 1),
    moveTo,
  );
  const stepButton = (symbol: string, name: string, by: number) =>
    h(
      "button",
      {
        type: "button",
        class: "icon",
        "aria-label": name,
        title: name,
        "data-key": name,
        click: () => {
          moveTo(state.step + by);
          stepSlider.set(state.step);
        },
      },
      symbol,
    );
  const backButton = stepButton("‹", words.decoder.back, -1);
  const nextButton = stepButton("›", words.decoder.next, 1);

  function drawSource() {
    if (!walk) return;
    const { ids } = walk.encoded;
    const names = walk.source;
    refill(
      source,
      card(
        "tokens",
        words.tokens.title,
        words.tokens.says(ids.length, about.vocab_size),
        box({
          name: "tokens",
          title: words.tokens.box,
          equation: words.tokens.equation,
          wide: true,
          picture: h(
            "ol",
            { class: "chips" },
            ...names.map((name, index) =>
              h("li", { class: "chip" }, name, h("small", {}, String(ids[index]))),
            ),
          ),
          numbers: () =>
            numberTable(
              words.tokens.box,
              [text.token, words.tokens.id],
              names.map((name, index) => ({ name, cells: [String(ids[index])] })),
            ),
        }),
      ),
      embeddingCard("embeddings", "encoder", walk.encoded.values, { names }, model),
    );
  }

  function drawEncoder() {
    if (!walk) return;
    const { values } = walk.encoded;
    const names = walk.source;
    const layer = state.el - 1;
    const before = layer ? values[`encoder.${layer - 1}.ff.norm`] : values["encoder.input"];
    const setHead = (head: number) => {
      encoderHead.set(String(head + 1));
      change("eh", drawEncoder)(String(head + 1));
    };
    refill(
      encoder,
      ...attentionCards(
        "e",
        `encoder.${layer}.self`,
        values,
        { names },
        names,
        state.eh - 1,
        about.encoder_heads,
        setHead,
        before,
        {
          chosen: state.word,
          onChoose: (query) => {
            state.word = state.word === query ? -1 : query;
            writeLink();
            drawEncoder();
          },
        },
      ),
      ...feedForwardCards(
        "e",
        `encoder.${layer}.ff`,
        values,
        values[`encoder.${layer}.self.norm`],
        {
          rows: names,
        },
      ),
    );
    watch();
  }

  function drawDecoder() {
    if (!walk) return;
    const { values, inputs, outputs } = walk;
    const names = inputs.map((id) => model.nameOf(id));
    const current = state.step - 1;
    const rows = { rows: names, current, last: current };
    const layer = state.dl - 1;
    const prefix = `decoder.${layer}`;
    const before = layer ? values[`decoder.${layer - 1}.ff.norm`] : values["decoder.input"];
    const setHead = (head: number) => {
      decoderHead.set(String(head + 1));
      change("dh", drawDecoder)(String(head + 1));
    };
    const choose = {
      chosen: current,
      written: outputs.map((id) => model.nameOf(id)),
      onChoose: (query: number) => {
        moveTo(query + 1);
        stepSlider.set(state.step);
      },
    };
    const attention = (id: "d" | "c", part: string, keys: string[], input: Table) =>
      attentionCards(
        id,
        `${prefix}.${part}`,
        values,
        { names, current, last: current },
        keys,
        state.dh - 1,
        about.decoder_heads,
        setHead,
        input,
        choose,
      );
    refill(
      decoder,
      card(
        "d-tokens",
        words.decoder.tokens,
        words.decoder.start,
        h(
          "ol",
          { class: "chips", "aria-label": words.decoder.written },
          ...names
            .slice(0, state.step)
            .map((name, index) =>
              h(
                "li",
                { class: index === current ? "chip is-current" : "chip" },
                name,
                h("small", {}, String(inputs[index])),
              ),
            ),
          h(
            "li",
            { class: "chip is-next" },
            model.nameOf(outputs[current]),
            h("small", {}, words.decoder.coming),
          ),
        ),
      ),
      embeddingCard("d-embeddings", "decoder", values, { names, current, last: current }, model),
      ...attention("d", "self", names, before),
      ...attention("c", "cross", walk.source, values[`${prefix}.self.norm`]),
      ...feedForwardCards("d", `${prefix}.ff`, values, values[`${prefix}.cross.norm`], rows),
      nextCard(values.logits, current, outputs[current]),
    );
    backButton.disabled = current === 0;
    nextButton.disabled = current === outputs.length - 1;
    watch();
  }

  function nextCard(logits: Table, step: number, chosen: number): HTMLElement {
    const size = logits.dims[2];
    const row = logits.data.subarray(step * size, (step + 1) * size);
    const probabilities = logSoftmax(row).map(Math.exp);
    const likely = highest(probabilities, NUM_LIKELY);
    // the search may choose a token that is not among the most likely
    if (!likely.includes(chosen)) likely[likely.length - 1] = chosen;
    const share = (token: number) => `${(100 * probabilities[token]).toFixed(1)}%`;
    return card(
      "next",
      words.next.title,
      words.next.says(size),
      box({
        name: "next",
        title: words.next.box,
        equation: words.next.equation,
        wide: true,
        picture: h(
          "ol",
          { class: "bars" },
          ...likely.map((token) =>
            h(
              "li",
              {
                class: token === chosen ? "is-chosen" : "",
                "aria-label": words.next.bar(model.nameOf(token), share(token)),
              },
              h("span", { class: "bar-name" }, model.nameOf(token)),
              h(
                "span",
                { class: "bar" },
                h("i", { style: `width:${100 * probabilities[token]}%` }),
              ),
              h("span", { class: "bar-value" }, share(token)),
              h("span", { class: "bar-mark" }, token === chosen ? words.next.chosen : ""),
            ),
          ),
        ),
        numbers: () =>
          numberTable(
            words.next.box,
            words.next.columns,
            likely.map((token) => ({
              name: model.nameOf(token),
              cells: [row[token], probabilities[token]],
            })),
          ),
      }),
    );
  }

  const go = (name: string) => {
    const target = document.getElementById(name);
    target?.scrollIntoView({ behavior: "smooth", block: "start" });
    target?.focus({ preventScroll: true });
  };
  const map = figureMap(about.encoder_layers, about.decoder_layers, go);
  const visible = new Map<string, number>();
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { target, intersectionRatio, isIntersecting } of entries)
        visible.set(target.id, isIntersecting ? intersectionRatio : 0);
      const here = [...document.querySelectorAll("#figure .card")].find(
        ({ id }) => (visible.get(id) ?? 0) > 0,
      );
      if (here) map.mark(here.id);
    },
    { rootMargin: "-30% 0px -50% 0px" },
  );
  function watch() {
    observer.disconnect();
    for (const one of document.querySelectorAll("#figure .card")) observer.observe(one);
  }

  const group = (id: string, title: string, says: string, bar: Child, body: HTMLElement) =>
    h(
      "section",
      { class: "group", id, "aria-label": title },
      h("h3", {}, title),
      h("p", { class: "lead" }, says),
      bar,
      body,
    );
  const element = h(
    "section",
    { id: "figure", class: "view", "aria-labelledby": "figure-title" },
    h("h2", { id: "figure-title" }, words.title),
    h("p", { class: "lead" }, words.lead),
    h(
      "div",
      { class: "with-map" },
      map.element,
      h(
        "div",
        { class: "walk" },
        group("source", words.embeddings.group, words.embeddings.groupSays, null, source),
        group(
          "encoder",
          words.encoder.group,
          words.encoder.says(about.encoder_layers),
          h(
            "div",
            { class: "bar-controls", role: "group", "aria-label": words.encoder.controls },
            encoderLayer.element,
            encoderHead.element,
          ),
          encoder,
        ),
        group(
          "decoder",
          words.decoder.group,
          words.decoder.says,
          h(
            "div",
            { class: "bar-controls", role: "group", "aria-label": words.decoder.controls },
            h(
              "div",
              { class: "steps" },
              backButton,
              stepSlider.element,
              nextButton,
            ),
            decoderLayer.element,
            decoderHead.element,
          ),
          decoder,
        ),
      ),
    ),
  );

  /** Show another sentence, or draw the same one again. */
  const show = (next: Walk | undefined) => {
    walk = next ?? walk;
    if (!walk) return;
    state.el = clamp(Math.round(state.el), 1, about.encoder_layers);
    state.eh = clamp(Math.round(state.eh), 1, about.encoder_heads);
    state.dl = clamp(Math.round(state.dl), 1, about.decoder_layers);
    state.dh = clamp(Math.round(state.dh), 1, about.decoder_heads);
    // step 0 stands for the middle, where the mask and the written tokens show
    const steps = walk.outputs.length;
    state.step = state.step ? clamp(Math.round(state.step), 1, steps) : Math.ceil(steps / 2);
    state.word = clamp(Math.round(state.word), -1, walk.source.length - 1);
    encoderLayer.set(String(state.el));
    encoderHead.set(String(state.eh));
    decoderLayer.set(String(state.dl));
    decoderHead.set(String(state.dh));
    stepSlider.set(state.step, walk.outputs.length);
    drawSource();
    drawEncoder();
    drawDecoder();
  };
  return { element, show };
}

/** Return a number as the score of a translation. */
export const scoreText = (score: number) => shown(score, 3);
