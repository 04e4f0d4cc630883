/** Figure 1 as a map: each box leads to its card. */

import { h, s } from "./dom";
import { text } from "./text";

const names = text.figure.mapBoxes;

interface MapBox {
  card: string;
  label: string[];
  x: number;
  y: number;
  kind: string;
}

const WIDTH = 108;
const HEIGHT = 30;
const LEFT = 30;
const RIGHT = 176;

const wrap = (label: string) => {
  const words = label.split(" ");
  if (label.length <= 17 || words.length < 2) return [label];
  const splits = words
    .slice(1)
    .map((_, i) => [words.slice(0, i + 1).join(" "), words.slice(i + 1).join(" ")]);
  const longest = (lines: string[]) => Math.max(...lines.map((line) => line.length));
  return splits.reduce((best, one) => (longest(one) < longest(best) ? one : best));
};

const at = (card: string, label: string, x: number, y: number, kind: string): MapBox => ({
  card,
  label: wrap(label),
  x,
  y,
  kind,
});

const BOXES: MapBox[] = [
  at("tokens", names.inputs, LEFT, 452, "plain"),
  at("embeddings", names.embedding, LEFT, 404, "embedding"),
  at("e-heads", names.attention, LEFT, 300, "attention"),
  at("e-norm", names.addNorm, LEFT, 264, "norm"),
  at("e-ff", names.feedForward, LEFT, 216, "feed"),
  at("e-ff-norm", names.addNorm, LEFT, 180, "norm"),
  at("d-tokens", names.outputs, RIGHT, 452, "plain"),
  at("d-embeddings", names.embedding, RIGHT, 404, "embedding"),
  at("d-heads", names.masked, RIGHT, 300, "attention"),
  at("d-norm", names.addNorm, RIGHT, 264, "norm"),
  at("c-heads", names.attention, RIGHT, 216, "attention"),
  at("c-norm", names.addNorm, RIGHT, 180, "norm"),
  at("d-ff", names.feedForward, RIGHT, 132, "feed"),
  at("d-ff-norm", names.addNorm, RIGHT, 96, "norm"),
  at("next", `${names.linear}, ${names.softmax.toLowerCase()}`, RIGHT, 44, "softmax"),
  at("next", names.probabilities, RIGHT, 4, "plain"),
];

/** Return the map, and a function that marks the boxes of one card. */
export function figureMap(
  encoderLayers: number,
  decoderLayers: number,
  go: (card: string) => void,
) {
  const svg = s("svg", {
    viewBox: "11 0 296 486",
    class: "map",
    role: "group",
    "aria-label": text.figure.map,
  });
  const line = (d: string) => svg.append(s("path", { class: "map-line", d }));
  const middle = (x: number) => x + WIDTH / 2;
  // stacks
  const stack = (x: number, y: number, height: number, count: number, labelX: number) => {
    svg.append(s("rect", { class: "map-stack", x: x - 12, y, width: WIDTH + 24, height, rx: 10 }));
    const label = s("text", { class: "map-times", x: labelX, y: y + height - 5 });
    label.append(text.figure.times(count));
    svg.append(label);
  };
  stack(LEFT, 168, 184, encoderLayers, LEFT + WIDTH - 14);
  stack(RIGHT, 84, 268, decoderLayers, RIGHT - 6);
  // the residual stream, from below to above
  line(`M${middle(LEFT)},452V166`);
  line(`M${middle(RIGHT)},452V34`);
  // each residual connection leads around a sub-layer
  const around = (x: number, side: number, below: number, norm: number) =>
    line(`M${middle(x)},${below}H${side}V${norm + HEIGHT / 2}H${side < x ? x : x + WIDTH}`);
  for (const [below, norm] of [
    [337, 264],
    [255, 180],
  ]) {
    around(LEFT, LEFT - 6, below, norm);
    around(RIGHT, RIGHT + WIDTH + 6, below, norm);
  }
  around(RIGHT, RIGHT + WIDTH + 6, 171, 96);
  // memory: from the encoder to the cross-attention
  line(`M${middle(LEFT)},180V152H${RIGHT - 22}V231H${RIGHT}`);
  // positions
  for (const x of [LEFT, RIGHT]) {
    svg.append(s("circle", { class: "map-plus", cx: middle(x), cy: 374, r: 9 }));
    svg.append(s("path", { class: "map-sign", d: `M${middle(x) - 5},374h10m-5,-5v10` }));
    const sine = x === LEFT ? x - 8 : x + WIDTH + 8;
    svg.append(s("circle", { class: "map-plus", cx: sine, cy: 374, r: 9 }));
    svg.append(s("path", { class: "map-sign", d: `M${sine - 6},374q3,-8 6,0t6,0` }));
    line(x === LEFT ? `M${sine + 9},374H${middle(x) - 9}` : `M${sine - 9},374H${middle(x) + 9}`);
  }
  const links: { card: string; link: SVGElement }[] = [];
  for (const { card, label, x, y, kind } of BOXES) {
    const link = s(
      "a",
      {
        href: `#${card}`,
        class: `map-box is-${kind}`,
        click: (event) => {
          event.preventDefault();
          go(card);
        },
      },
      s("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 6 }),
    );
    const words = s("text", { "text-anchor": "middle" });
    label.forEach((part, index) => {
      const shift = label.length === 1 ? 4 : index * 11 - 2;
      words.append(s("tspan", { x: middle(x), y: y + HEIGHT / 2 + shift }, part));
    });
    link.append(words);
    svg.append(link);
    links.push({ card, link });
  }
  const mark = (card: string) => {
    const shown = card.replace(/^([edc])-(qkv|scores|output)$/, "$1-heads");
    for (const one of links) one.link.classList.toggle("is-here", one.card === shown);
  };
  return { element: h("nav", { class: "map-frame", "aria-label": text.figure.map }, svg), mark };
}
