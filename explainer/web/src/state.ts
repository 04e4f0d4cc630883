/** The state of the page, which is also in its link. */

export type Theme = "auto" | "light" | "dark";

export interface State {
  /** Sentence to translate. */
  s: string;
  /** Which sentence of the text the pictures show, counted from 1. */
  part: number;
  /** Section that the reader looks at. */
  view: string;
  /** Layer and head of the encoder, both counted from 1. */
  el: number;
  eh: number;
  /** Layer and head of the decoder. */
  dl: number;
  dh: number;
  /** Step of the decoder, counted from 1; 0 for the middle one. */
  step: number;
  /** Source token whose lines are shown, counted from 0; -1 for all. */
  word: number;
  /** Names of the boxes that are open. */
  open: string[];
  /** Beam size and alpha of the search. */
  beams: number;
  alpha: number;
  /** Settings of the positions. */
  code: string;
  base: number;
  d: number;
  n: number;
  k: number;
  pos: number;
  theme: Theme;
}

export const state: State = {
  s: "",
  part: 1,
  view: "",
  el: 1,
  eh: 1,
  dl: 1,
  dh: 1,
  step: 0,
  word: -1,
  open: [],
  beams: 4,
  alpha: 0.6,
  code: "sinusoidal",
  base: 10000,
  d: 64,
  n: 64,
  k: 5,
  pos: 10,
  theme: "auto",
};

const defaults: State = { ...state, open: [] };

/** Make some values the defaults, which the link leaves out. */
export function setDefaults(values: Partial<State>) {
  Object.assign(defaults, values);
  Object.assign(state, values);
}

/** Read the state from the link: defaults for what it leaves out; ignore what is not a state. */
export function readLink() {
  Object.assign(state, defaults, { open: [] });
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [name, text] of given) {
    if (!(name in defaults)) continue;
    const key = name as keyof State;
    const usual = defaults[key];
    const number = Number(text);
    if (Array.isArray(usual)) state.open = text ? text.split(",") : [];
    else if (typeof usual === "string") Object.assign(state, { [key]: text });
    else if (text !== "" && Number.isFinite(number)) Object.assign(state, { [key]: number });
  }
  if (!["auto", "light", "dark"].includes(state.theme)) state.theme = "auto";
}

/** Write the state into the link. */
export function writeLink() {
  const link = new URLSearchParams();
  for (const key of Object.keys(defaults) as (keyof State)[]) {
    const text = String(state[key]);
    if (text !== String(defaults[key])) link.set(key, text);
  }
  const hash = link.toString();
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}

/** Return a number within bounds; the lower bound for what is not a number. */
export function clamp(value: number, lowest: number, highest: number): number {
  return Number.isFinite(value) ? Math.min(Math.max(value, lowest), highest) : lowest;
}
