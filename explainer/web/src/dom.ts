/** Small helpers for elements, formulas and numbers. */

import "katex/dist/katex.min.css";
import katex from "katex";

export type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | undefined | ((event: Event) => void)>;

function fill(element: Element, attributes: Attributes, children: Child[]) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child) element.append(child);
}

/** Return a new element; functions among its attributes listen to the event of their name. */
export function h<Name extends keyof HTMLElementTagNameMap>(
  name: Name,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[Name] {
  const element = document.createElement(name);
  fill(element, attributes, children);
  return element;
}

/** Return a new SVG element. */
export function s<Name extends keyof SVGElementTagNameMap>(
  name: Name,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[Name] {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  fill(element, attributes, children);
  return element;
}

/** Return a formula, with MathML for screen readers. */
export function formula(tex: string, displayMode = true): HTMLElement {
  const element = h(displayMode ? "div" : "span", { class: "formula" });
  katex.render(tex, element, { displayMode, output: "htmlAndMathml" });
  return element;
}

/** Return a number as text, with a true minus sign. */
export function shown(value: number, digits = 4): string {
  if (value === -Infinity) return "−∞";
  return value.toFixed(digits).replace("-", "−");
}

const RAISED: Record<string, string> = Object.fromEntries(
  [..."-0123456789"].map((sign, index) => [sign, "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"[index]]),
);

/** Return a text in which d_k, M_k and the like have an index. */
export function rich(says: string): DocumentFragment {
  const fragment = document.createDocumentFragment();
  says.split(/(?<![A-Za-z])([dM])_(k|v|model|ff)(?![A-Za-z])/).forEach((part, index) => {
    if (index % 3 === 0) fragment.append(part);
    else if (index % 3 === 1) fragment.append(h("i", {}, part));
    else fragment.append(h("sub", {}, part));
  });
  return fragment;
}

/** Return the text of a number that may be very large or very small. */
export function brief(value: number): string {
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) {
    const [digits, exponent] = value.toExponential(1).split("e");
    const raised = [...String(Number(exponent))].map((sign) => RAISED[sign]).join("");
    return `${digits.replace("-", "−")} · 10${raised}`;
  }
  const rounded = Number(value.toPrecision(4));
  return rounded.toLocaleString("en-US", { maximumFractionDigits: 6 }).replace("-", "−");
}

const tip = () => document.getElementById("tip")!;

/** Show a short text beside the pointer, or beside another place of the window. */
export function showTip(text: string, event: Pick<PointerEvent, "clientX" | "clientY">) {
  const box = tip();
  box.textContent = text;
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - width - 8);
  const top =
    event.clientY + height + 26 > window.innerHeight
      ? event.clientY - height - 12
      : event.clientY + 18;
  box.style.left = `${Math.max(8, left)}px`;
  box.style.top = `${top}px`;
}

/** Hide the text beside the pointer. */
export function hideTip() {
  tip().hidden = true;
}
