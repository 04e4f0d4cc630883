/** Controls: groups of choices and sliders. */

import { h } from "./dom";

/** Return buttons of which one is chosen; `choose` sets it from outside. */
export function choices(
  name: string,
  key: string,
  options: { value: string; label: string }[],
  chosen: string,
  onChoose: (value: string) => void,
): { element: HTMLElement; set: (value: string) => void } {
  const buttons = options.map(({ value, label }) =>
    h("input", {
      type: "radio",
      name: key,
      value,
      id: `${key}-${value}`,
      "aria-label": `${name} ${label}`,
      checked: value === chosen,
      change: () => onChoose(value),
    }),
  );
  const element = h(
    "div",
    { class: "choices", role: "radiogroup", "aria-label": name, "data-control": key },
    h("span", { class: "control-name", "aria-hidden": "true" }, name),
    ...options.flatMap(({ value, label }, index) => [
      buttons[index],
      h("label", { for: `${key}-${value}` }, label),
    ]),
  );
  const set = (value: string) =>
    buttons.forEach((button) => (button.checked = button.value === value));
  return { element, set };
}

/** Return a slider with its name and its value. */
export function slider(
  name: string,
  key: string,
  [lowest, highest, step]: [number, number, number],
  value: number,
  show: (value: number) => string,
  onMove: (value: number) => void,
): { element: HTMLElement; set: (value: number, highest?: number) => void } {
  const output = h("output", { for: key }, show(value));
  const input = h("input", {
    type: "range",
    id: key,
    min: lowest,
    max: highest,
    step,
    "aria-valuetext": show(value),
    "data-control": key,
  });
  input.value = String(value);
  const say = () => {
    output.textContent = show(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  input.addEventListener("input", () => {
    say();
    onMove(Number(input.value));
  });
  const set = (next: number, most?: number) => {
    if (most !== undefined) input.max = String(most);
    input.value = String(next);
    say();
  };
  return {
    element: h("div", { class: "slider" }, h("label", { for: key }, name), input, output),
    set,
  };
}
