/** The page: sentence, figure 1, search and positions. */

import "./style.css";
import { MOST_ALPHA, MOST_BEAMS, searchSection } from "./beam";
import { h } from "./dom";
import { positionsSection } from "./explorer";
import { type Encoded, Model } from "./model";
import { type Found, Replaced, search } from "./search";
import { sentencesOf } from "./sentences";
import { type Theme, clamp, readLink, setDefaults, state, writeLink } from "./state";
import { text } from "./text";
import { scoreText, walkSection } from "./walk";

declare const __RUNTIME_BYTES__: number;

const page = document.getElementById("page")!;
const megabytes = (bytes: number) => `${(bytes / 1e6).toFixed(1)} MB`;

function applyTheme() {
  if (state.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = state.theme;
}

readLink();
applyTheme();
document.title = text.title;

const themes: Theme[] = ["auto", "light", "dark"];
const symbols = { auto: "◐", light: "☀", dark: "☾" };
let redraw = () => {};
const themeButton = h("button", {
  type: "button",
  class: "icon is-theme",
  "data-control": "theme",
  click: () => {
    state.theme = themes[(themes.indexOf(state.theme) + 1) % themes.length];
    applyTheme();
    sayTheme();
    writeLink();
    redraw();
  },
});
function sayTheme() {
  themeButton.textContent = symbols[state.theme];
  themeButton.setAttribute("aria-label", text.theme[state.theme]);
  themeButton.title = text.theme[state.theme];
}
sayTheme();

const views = ["figure", "search", "positions"] as const;
const links = views.map((view) =>
  h(
    "a",
    {
      href: `#view=${view}`,
      click: (event: Event) => {
        event.preventDefault();
        state.view = view;
        writeLink();
        document.getElementById(view)?.scrollIntoView({ behavior: "smooth" });
      },
    },
    text.nav[view],
  ),
);
const top = h(
  "header",
  { class: "top" },
  h(
    "div",
    { class: "top-inner" },
    h("nav", { "aria-label": text.nav.label }, ...links),
    themeButton,
  ),
);

const input = h("input", {
  type: "text",
  id: "sentence",
  autocomplete: "off",
  spellcheck: "false",
  enterkeyhint: "go",
  "data-control": "s",
});
const message = h("p", { class: "message", role: "alert" });
const result = h("output", { id: "translation", for: "sentence", "aria-live": "polite" });
const score = h("p", { class: "score" });
const unsure = h("p", { class: "unsure-note" });
const examples = h("div", { class: "examples" });
const knows = h("p", { class: "knows" });
const form = h(
  "form",
  { class: "sentence", novalidate: true },
  h("label", { for: "sentence" }, text.sentence.label),
  h("div", { class: "entry" }, input, h("button", { type: "submit" }, text.sentence.button)),
  message,
  h(
    "div",
    { class: "result" },
    h("span", { class: "result-name" }, text.sentence.result),
    result,
    score,
    unsure,
  ),
  knows,
  examples,
);
const loading = h("p", { class: "loading", role: "status" }, text.loading.model);
const main = h("main", {}, loading);
const footer = h("footer", {});
page.append(
  top,
  h("div", { class: "hero" }, h("h1", {}, text.title), h("p", { class: "lead" }, text.lead), form),
  main,
  footer,
);

async function start() {
  let model: Model;
  try {
    model = await Model.load("model", (part) => {
      loading.textContent = text.loading[part as "model" | "runtime"];
    });
  } catch (error) {
    loading.textContent = text.loading.failed;
    loading.classList.add("is-error");
    console.error(error);
    return;
  }
  const { about } = model;
  const isDemo = about.corpus === "demo";
  const given = isDemo ? text.demoExamples : text.otherExamples;
  setDefaults({ s: given[0], beams: clamp(about.num_beams, 1, MOST_BEAMS), alpha: about.alpha });
  readLink();
  state.beams = Math.round(clamp(state.beams, 1, MOST_BEAMS));
  state.alpha = clamp(state.alpha, 0, MOST_ALPHA);
  const limit = text.sentence.limit(about.most_tokens);
  knows.textContent = `${isDemo ? text.sentence.demo : text.sentence.other(about.corpus)} ${limit}`;
  examples.append(
    h("span", { class: "control-name" }, text.sentence.examples),
    ...given.map((sentence) =>
      h(
        "button",
        {
          type: "button",
          class: "example",
          click: () => {
            input.value = sentence;
            void translate(true);
          },
        },
        sentence,
      ),
    ),
  );
  input.value = state.s;

  const walk = walkSection(model);
  const tree = searchSection(model, () => void translate(false));
  const positions = positionsSection();
  const modelBytes = Object.entries(about.bytes).reduce(
    (sum, [name, bytes]) => sum + (name === "model.json" ? 0 : bytes),
    0,
  );
  footer.append(
    h(
      "p",
      { id: "sizes" },
      text.footer.about(about, megabytes(__RUNTIME_BYTES__), megabytes(modelBytes)),
    ),
    h("h2", {}, text.footer.more),
    h(
      "ul",
      {},
      ...text.footer.links.map(([address, name, best]) =>
        h("li", {}, h("a", { href: address, rel: "noreferrer" }, name), `: ${best}`),
      ),
    ),
  );

  interface Part {
    encoded: Encoded;
    found: Found;
    translation: string;
    isUnsure: boolean;
  }
  let parts: Part[] = [];

  let shown = 0;
  /** Show the translation of all sentences, and one of them in the pictures. */
  async function show() {
    const mine = ++shown;
    state.part = Math.round(clamp(state.part, 1, parts.length));
    const { encoded, found } = parts[state.part - 1];
    const [best] = found.complete;
    const inputs = [about.start, ...best.ids].slice(0, best.ids.length);
    const values = await model.decode(inputs, encoded);
    if (mine !== shown) return;
    const choose = (part: number) => {
      state.part = part;
      state.step = 0;
      state.word = -1;
      void show();
    };
    const several = parts.length > 1;
    result.replaceChildren(
      ...parts.flatMap(({ translation, isUnsure }, index) => {
        const look = `part ${isUnsure ? "is-unsure" : ""}`;
        const press = { type: "button", "aria-pressed": index === state.part - 1 ? "true" : "false" };
        const one = several
          ? h("button", { class: look, ...press, click: () => choose(index + 1) }, translation)
          : h("span", { class: look }, translation);
        return index ? [" ", one] : [one];
      }),
    );
    const said = text.sentence.score(scoreText(best.score), state.beams, state.alpha.toFixed(1));
    score.textContent = [
      said,
      best.isCut && text.sentence.cut,
      several && text.sentence.part(state.part, parts.length),
    ]
      .filter(Boolean)
      .join(". ");
    const isUnsure = about.calibration && parts.some((one) => one.isUnsure);
    unsure.textContent = isUnsure ? text.sentence.unsure(about.calibration!) : "";
    walk.show({
      encoded,
      source: encoded.ids.map((id) => model.nameOf(id)),
      inputs,
      outputs: best.ids,
      values,
    });
    tree.show(found);
    writeLink();
  }

  let number = 0;
  /** Translate what is entered, and show it everywhere. */
  async function translate(isNew: boolean) {
    const mine = ++number;
    const isCurrent = () => mine === number;
    const sentence = input.value.trim();
    const refuse = (says: string) => {
      message.textContent = says;
      document.body.classList.remove("is-working");
      input.setAttribute("aria-invalid", "true");
      document.body.classList.add("is-refused");
    };
    message.textContent = "";
    input.removeAttribute("aria-invalid");
    document.body.classList.remove("is-refused");
    if (!sentence) return refuse(text.sentence.empty);
    if (sentence.length > about.most_characters)
      return refuse(text.sentence.longText(sentence.length, about.most_characters));
    const tokens = sentencesOf(sentence).map((one) => model.tokenize(one));
    const longest = Math.max(...tokens.map((ids) => ids.length));
    if (longest > about.most_tokens) return refuse(text.sentence.long(longest, about.most_tokens));
    document.body.classList.add("is-working");
    try {
      const translated: Part[] = [];
      let step = 0;
      for (const ids of tokens) {
        const encoded = await model.encode(ids);
        const found = await search(model, encoded, state.beams, state.alpha, () => {
          step++;
          if (step % 8 === 0 && isCurrent()) score.textContent = text.sentence.working(step);
          return isCurrent();
        });
        const [best] = found.complete;
        const least = about.calibration?.threshold ?? -Infinity;
        translated.push({
          encoded,
          found,
          translation: model.detokenize(best.ids) || "–",
          isUnsure: best.total / best.length < least,
        });
      }
      parts = translated;
      state.s = sentence;
      if (isNew) {
        state.part = 1;
        state.step = 0;
        state.word = -1;
      }
      await show();
      if (!isCurrent()) return;
      document.body.dataset.translated = sentence;
      document.body.classList.remove("is-working");
    } catch (error) {
      if (error instanceof Replaced) return;
      refuse(text.sentence.failed);
      console.error(error);
    }
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    void translate(true);
  });

  main.replaceChildren(walk.element, tree.element, positions.element);
  redraw = () => {
    walk.show(undefined);
    positions.draw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) continue;
        links.forEach((link, index) =>
          views[index] === target.id
            ? link.setAttribute("aria-current", "true")
            : link.removeAttribute("aria-current"),
        );
      }
    },
    { rootMargin: "-45% 0px -50% 0px" },
  );
  for (const view of views) observer.observe(document.getElementById(view)!);
  // a link that somebody enters or that the browser goes back to
  addEventListener("hashchange", () => {
    readLink();
    applyTheme();
    sayTheme();
    positions.settle();
    positions.draw();
    input.value = state.s;
    void translate(false);
  });
  await translate(false);
  if (state.view) document.getElementById(state.view)?.scrollIntoView();
  document.body.dataset.ready = "true";
}

void start();
