/** All English text of the page. */

import type { Calibration, Description } from "./model";

const share = (value: number) => `${Math.round(100 * value)}%`;
const plural = (count: number, one: string) => `${count} ${one}${count === 1 ? "" : "s"}`;

export const text = {
  title: "The Transformer, from a sentence to its translation",
  lead:
    "A small encoder-decoder Transformer runs in this page, in your browser. Follow one sentence " +
    "through figure 1 of “Attention Is All You Need”, watch the search for its translation, and " +
    "take the positional encoding apart. Every number on this page is computed here.",
  nav: { label: "Sections", figure: "1 Figure 1", search: "2 Search", positions: "3 Positions" },
  theme: {
    auto: "Theme: system",
    light: "Theme: light",
    dark: "Theme: dark",
  },
  loading: {
    model: "Loading the model…",
    runtime: "Starting the runtime…",
    failed: "The model cannot be loaded. Reload the page, or export the model again.",
  },

  sentence: {
    label: "Sentences to translate",
    button: "Translate",
    examples: "Examples",
    result: "Translation",
    working: (step: number) => `Searching, step ${step}…`,
    score: (score: string, beams: number, alpha: string) =>
      `Score ${score} with beam size ${beams} and α = ${alpha}`,
    part: (part: number, count: number) =>
      `The score and the pictures are for sentence ${part} of ${count}: click on another sentence`,
    unsure: ({ threshold, poor_below, poor_above, chrf }: Calibration) =>
      "Underlined: the model is unsure, because the mean log P of a token is below " +
      `${threshold.toFixed(2).replace("-", "−")}. In a test ${share(poor_below)} of such ` +
      `translations were poor (chrF below ${chrf}), and ${share(poor_above)} of the others.`,
    empty: "Enter a sentence: there is nothing to translate yet.",
    long: (given: number, most: number) =>
      `The sentence must have at most ${most} tokens for the pictures, got ${given}. Shorten it.`,
    longText: (given: number, most: number) =>
      `The sentence must have at most ${most.toLocaleString("en-US")} characters, got ` +
      `${given.toLocaleString("en-US")}. Shorten it.`,
    limit: (tokens: number) => `A sentence may have up to ${tokens} tokens.`,
    failed: "The model cannot translate this sentence. Try another one.",
    cut: "The search reached its maximum length before an end token",
    demo:
      "This model is the demo of the package. It was trained on 24,000 sentences made from " +
      "templates: dates, times, numbers, money, units, countries and languages. Other sentences " +
      "give nonsense.",
    other: (corpus: string | null) =>
      corpus
        ? `This model was trained on ${corpus}. Sentences of another kind may give nonsense.`
        : "Sentences that differ from the training data of this model may give nonsense.",
  },
  demoExamples: [
    "In April 2005, Laura moved to Dublin.",
    "The train to Berlin leaves at 10:45 AM.",
    "Hannah has read 2.5% of the book.",
    "Last year, Jonas visited Italy and Poland.",
    "See you on Monday.",
  ],
  otherExamples: [
    "I love you.",
    "Where did you learn to speak German?",
    "The weather is nice today. Let's go to the park.",
    "My brother has not called me yet.",
    "Do you want to drink coffee or tea?",
  ],

  numbers: "Numbers and equation",
  shape: (rows: number | string, columns: number | string) => `${rows} × ${columns}`,
  tableOf: (title: string) => `Numbers of ${title}`,
  feature: "feature",
  token: "token",
  cell: (row: string, column: string, value: string) => `${row} · ${column}: ${value}`,
  hidden: "hidden by the mask",
  scale: { values: "value", weights: "weight", similarity: "similarity" },
  layer: "Layer",
  head: "Head",
  headName: (head: number) => `Head ${head}`,
  headLabel: (head: number) => `Show head ${head}`,

  figure: {
    title: "One sentence through figure 1",
    lead:
      "Read from top to bottom. The map shows where you are. Each picture is a table of numbers: " +
      "a row is a token, and a column is a feature. Open “Numbers and equation” below a picture " +
      "to see both.",
    map: "Map of figure 1. Each box leads to its picture.",
    mapBoxes: {
      inputs: "Inputs",
      outputs: "Outputs (shifted right)",
      embedding: "Embedding",
      position: "Positional encoding",
      attention: "Multi-head attention",
      masked: "Masked multi-head attention",
      addNorm: "Add & norm",
      feedForward: "Feed forward",
      linear: "Linear",
      softmax: "Softmax",
      probabilities: "Output probabilities",
    },
    times: (count: number) => `${count} ×`,

    tokens: {
      title: "A sentence becomes tokens",
      says: (count: number, size: number) =>
        `The tokenizer splits the sentence into ${plural(count, "token")}. Frequent words are one ` +
        `token, rare words are several. The vocabulary has ${size.toLocaleString("en-US")} tokens. ` +
        "The last token, </s>, marks the end.",
      box: "Tokens and their ids",
      equation: String.raw`x = (x_1, \ldots, x_n), \quad x_i \in \{0, \ldots, V - 1\}`,
      id: "id",
    },
    embeddings: {
      group: "From tokens to vectors",
      groupSays:
        "A Transformer computes with vectors. So the sentence is split into tokens, and each token " +
        "becomes a vector.",
      title: "A word vector plus a position vector",
      says: (width: number) =>
        `Each token has a learned vector of ${width} numbers. Attention alone does not see the ` +
        "order of the tokens, so a vector of the position is added. The sum enters layer 1.",
      boxes: {
        embeddings: "Embedding · √d",
        positions: "Positional encoding",
        input: "Sum",
      },
      equations: {
        embeddings: String.raw`e_i = \sqrt{d_\text{model}} \; E_{x_i}`,
        positions: String.raw`\begin{aligned} PE_{(pos, 2i)} &= \sin(pos / 10000^{2i / d_\text{model}}) \\ PE_{(pos, 2i+1)} &= \cos(pos / 10000^{2i / d_\text{model}}) \end{aligned}`,
        input: String.raw`x_i = e_i + PE_i`,
      },
    },

    encoder: {
      group: "Encoder",
      controls: "Layer and head of the encoder",
      says: (layers: number) =>
        `The encoder reads the whole sentence at once, in ${plural(layers, "layer")}. Choose a ` +
        "layer and a head; all pictures of the encoder follow.",
      attention: "Self-attention",
    },
    decoder: {
      group: "Decoder",
      controls: "Step, layer and head of the decoder",
      step: "Step",
      back: "Previous step",
      next: "Next step",
      stepOf: (step: number, steps: number) => `Step ${step} of ${steps}`,
      says:
        "The decoder writes one token in each step. It reads the tokens that it has written, and " +
        "the output of the encoder. The frame marks the current step. Later rows are pale, because " +
        "they are not computed yet.",
      tokens: "The decoder reads its own output",
      written: "Tokens so far",
      coming: "next",
      start:
        "The first input is a start token. Each later input is the token that the step before has " +
        "written.",
      masked: "Masked self-attention",
      cross: "Cross-attention",
    },

    headIn: (head: number) => `head ${head}`,
    qkvLabel: (title: string, head: number) => `head ${head}: ${title}`,
    qkv: {
      title: (kind: string) => `${kind}: each token asks, offers and gives`,
      says: {
        self:
          "A query says what a token looks for. A key says what a token offers. A value is what a " +
          "token gives. All three are products of the same row with three learned matrices. Each " +
          "head has matrices of its own, so each head can look for something else. A single head " +
          "would mix all that it finds in one average.",
        cross:
          "The queries come from the decoder. The keys and the values come from the encoder. This " +
          "is the only place where the translation sees the sentence.",
      },
      boxes: { query: "Query", key: "Key", value: "Value" },
      equations: {
        query: String.raw`Q = X W^Q`,
        key: String.raw`K = X W^K`,
        value: String.raw`V = X W^V`,
        crossQuery: String.raw`Q = X W^Q \quad \text{(X: decoder)}`,
        crossKey: String.raw`K = M W^K \quad \text{(M: memory of the encoder)}`,
        crossValue: String.raw`V = M W^V \quad \text{(M: memory of the encoder)}`,
      },
    },
    scores: {
      title: (kind: string) => `${kind}: scores become weights`,
      says: {
        self:
          "A score is the dot product of a query (row) and a key (column), divided by √d_k: d_k is " +
          "the number of columns of Q and K. The softmax turns each row into weights that sum to 1.",
        masked:
          "The mask hides the future: a token must not see the tokens after it. Hidden scores " +
          "become −∞, and their weights are 0. In training the whole translation is known, so all " +
          "rows can be computed at once.",
        cross:
          "Each row belongs to a step of the translation, each column to a token of the sentence. " +
          "Nothing is hidden: every step sees the whole sentence.",
      },
      boxes: { scores: "Scores", weights: "Weights after softmax" },
      equations: {
        scores: String.raw`S = \frac{Q K^\top}{\sqrt{d_k}}`,
        maskedScores: String.raw`S_{ij} = \begin{cases} q_i \cdot k_j / \sqrt{d_k} & j \le i \\ -\infty & j > i \end{cases}`,
        weights: String.raw`A = \operatorname{softmax}(S), \qquad \sum_j A_{ij} = 1`,
      },
      query: "queries ↓, keys →",
    },
    lines: {
      title: (kind: string) => `${kind}: who reads whom`,
      says:
        "A line is a weight: the stronger the line, the more the word on the left takes from the " +
        "word on the right. Point at a word, or move to it with the Tab key.",
      saysStep:
        "A line is a weight. A word on the left is the last one that is read; its row predicts the " +
        "next word. Point at another word, or move to it with the Tab key.",
      heads: "All heads of this layer; choose one",
      query: "reads",
      key: "is read",
      reads: (word: string, parts: string, written?: string) => {
        const takes = parts ? `takes ${parts}` : "takes less than 5% from each word";
        return written === undefined
          ? `“${word}” ${takes}.`
          : `The row that reads “${word}”, and predicts “${written}”, ${takes}.`;
      },
      isRead: (word: string, parts: string) =>
        parts ? `“${word}” is read by ${parts}.` : `No word takes 5% or more from “${word}”.`,
      part: (share: string, word: string) => `${share} from “${word}”`,
      by: (word: string, share: string) => `“${word}” (${share})`,
    },
    output: {
      title: (kind: string) => `${kind}: weighted values, heads joined`,
      says: (heads: number) =>
        "A head returns the average of the values, weighted by its weights. The results of " +
        `${plural(heads, "head")} are concatenated, and one more matrix mixes them.`,
      boxes: { context: "Output of this head", output: "All heads, mixed" },
      equations: {
        context: String.raw`\text{head}_h = A V`,
        output: String.raw`\operatorname{Concat}(\text{head}_1, \ldots, \text{head}_h) \, W^O`,
      },
    },
    norm: {
      title: (kind: string) => `Add & norm after ${kind.toLowerCase()}`,
      says:
        "The input of the sub-layer is added to its output, so the input stays available. Then " +
        "each row is scaled to mean 0 and variance 1. A learned gain and a learned bias for each " +
        "column come last, so the rows shown do not have exactly this mean and variance.",
      boxes: { before: "Input", sublayer: "Sub-layer output", norm: "After add & norm" },
      equations: {
        before: String.raw`x`,
        sublayer: String.raw`\operatorname{Sublayer}(x)`,
        norm: String.raw`\operatorname{LayerNorm}(x + \operatorname{Sublayer}(x))`,
      },
    },
    ff: {
      kind: "Feed forward",
      title: "Feed forward: each token separately",
      says: (inner: number, width: number) =>
        `Two linear layers with a ReLU between them: ${width} numbers become ${inner}, and ${width} ` +
        "again. The ReLU sets negative numbers to 0. Here tokens do not see each other.",
      boxes: { inner: "Inner layer after ReLU", output: "Output", norm: "After add & norm" },
      equations: {
        inner: String.raw`\max(0, x W_1 + b_1)`,
        output: String.raw`\operatorname{FFN}(x) = \max(0, x W_1 + b_1) W_2 + b_2`,
        norm: String.raw`\operatorname{LayerNorm}(x + \operatorname{FFN}(x))`,
      },
    },
    next: {
      title: "Probabilities of the next token",
      says: (size: number) =>
        `The last row of the decoder, times the embedding matrix, gives ${size.toLocaleString(
          "en-US",
        )} logits, one for each token. The softmax turns them into probabilities. The ten highest ` +
        "are shown. " +
        "Beam search may choose a token other than the first.",
      box: "Next token",
      chosen: "chosen",
      equation: String.raw`P(y_t \mid y_{<t}, x) = \operatorname{softmax}(h_t E^\top)`,
      columns: ["token", "logit", "probability"],
      bar: (word: string, share: string) => `${word}: ${share}`,
    },
  },

  search: {
    title: "Beam search: keep several beginnings alive",
    lead:
      "The model gives probabilities of the next token only. Search builds sentences from them. In " +
      "each step, beam search extends every open beginning, and keeps only the best ones; the beam " +
      "size is their number. With beam size 1, this is greedy search. A beginning that ends with " +
      "</s> is complete, and is kept in addition to the open ones. The thick path is the translation.",
    beams: "Beam size",
    alpha: "Length penalty α",
    tree: (steps: number, nodes: number) =>
      `Tree of the search: ${plural(steps, "step")}, ${plural(nodes, "sequence")}. The table below ` +
      "has the complete ones.",
    legend: {
      best: "best translation",
      open: "leads to a complete one",
      dead: "pruned later",
      end: "complete; below a box: log P so far, or = score",
    },
    node: (words: string, logProb: string, total: string) =>
      `“${words}”: log P of this token ${logProb}, of the sequence ${total}`,
    ended: (words: string, total: string, penalty: string, score: string) =>
      `“${words}”: log P ${total} / lp ${penalty} = score ${score}`,
    table: "Complete hypotheses, best first",
    columns: ["translation", "tokens", "log P", "lp", "score"],
    says:
      "Each token adds a negative number to log P, so log P alone prefers short sentences. The " +
      "length penalty lp balances this. α = 0 compares log P alone; a larger α favors longer " +
      "sentences. |y| is the number of tokens, </s> included.",
    equation: String.raw`\begin{aligned} \text{score}(y) &= \frac{\log P(y \mid x)}{lp(y)} \\[0.6em] lp(y) &= \left( \frac{5 + |y|}{6} \right)^{\alpha} \end{aligned}`,
    penaltyTitle: "Why divide by lp?",
  },

  positions: {
    title: "Positions: from counting to sinusoids",
    lead:
      "Attention sees a set of vectors. To see an order, each position needs a vector of its own. " +
      "Try seven ways to write a position, and see which of them keeps every position different, " +
      "bounded and easy to compare.",
    candidates: {
      integer: "integer",
      fraction: "fraction",
      sine: "one sine",
      pairs: "pairs",
      binary: "binary",
      sinusoidal: "sinusoids",
      learned: "learned",
    },
    candidate: "Code of the position",
    formulas: {
      integer: String.raw`p_{pos} = pos`,
      fraction: String.raw`p_{pos} = (pos + 1) / n`,
      sine: String.raw`p_{pos} = \sin(pos)`,
      pairs: String.raw`\begin{gathered} \sin(pos / j), \; \cos(pos / j) \\ j = 1, 2, \ldots, d / 2 \end{gathered}`,
      binary: String.raw`p_{pos, i} = \lfloor pos / 2^i \rfloor \bmod 2`,
      sinusoidal: String.raw`\begin{gathered} \sin(pos / b^{2i/d}), \; \cos(pos / b^{2i/d}) \\ i = 0, \ldots, d / 2 - 1 \end{gathered}`,
      learned: String.raw`p_{pos} = W_{pos}, \quad W \in \mathbb{R}^{n \times d}`,
    },
    verdicts: {
      integer:
        "Every position is different, but the numbers grow without bound, and become larger than the word vectors.",
      fraction:
        "Bounded, but one step has a different size in each sentence: 1/n depends on the length.",
      sine: "Bounded, but one wave repeats: positions near a full turn apart get the same number.",
      pairs:
        "Waves of 2π, 4π, 6π, … with sine and cosine. Most waves are similar, so many features say " +
        "the same.",
      binary:
        "Every position is different and bounded, but neighbors jump: from 7 to 8, four bits flip.",
      sinusoidal:
        "Bounded and smooth, and with a large base every position is different. An offset is one " +
        "rotation, so a head can learn “five tokens back” once, for all positions. The paper takes " +
        "base b = 10000, with which few pairs are enough.",
      learned:
        "A matrix of weights, shown with its random initial values. Training sets the rows. In the " +
        "paper, BLEU is about the same as with sinusoids. But no row exists after the last trained one.",
    },
    controls: {
      base: "Base b",
      d: "Features d",
      n: "Positions n",
      k: "Offset k",
      pos: "Position",
    },
    widened: (bits: number) => `Position n − 1 needs ${bits} bits, so d is ${bits} here.`,
    ignored: (names: string[]) =>
      `${names.join(" and ")} ${names.length === 1 ? "has" : "have"} no effect on this code.`,
    heatmap: {
      title: "The table: one row for each position",
      says:
        "Waves get slower from left to right, and a larger base makes them slower. Fast waves " +
        "distinguish neighbors, slow waves show the rough position.",
      saysOther: "Each row is the code of one position.",
      rows: "position",
      columns: "feature",
      label: "Table of the code: positions by features",
    },
    similarity: {
      title: "Similarity of every two positions",
      says: (pairs: number, first: string) =>
        pairs
          ? `${plural(pairs, "pair")} of positions nearly agree: they are closer than a tenth of ` +
            `the usual step (dots). ${first}`
          : "No two positions are the same. The similarity is the cosine of two rows.",
      first: (position: number, earlier: number) =>
        `The first repeat is position ${position}, of position ${earlier}.`,
      oneFeature: " With one feature, the cosine is only a sign.",
      label: "Cosine similarity of positions, with marks where two positions collide",
    },
    dot: {
      title: "Dot product against distance",
      says: {
        fixed:
          "At each distance all pairs of positions have the same dot product.",
        varies:
          "The band shows the lowest and the highest value at each distance: the dot product also depends on the two positions.",
      },
      axis: "distance",
      label: "Dot product of two positions against their distance",
      value: (distance: number, mean: string) => `distance ${distance}: ${mean}`,
    },
    clocks: {
      title: (k: number) => `An offset of ${k} is a rotation of each pair`,
      says: (difference: string) =>
        "The solid hand is the position, the dashed hand is k positions later. The angle between " +
        "them is the same at every position. The matrix M_k turns each pair by this angle. " +
        `Largest difference between M_k PE(pos) and PE(pos + k): ${difference}.`,
      others: {
        integer: {
          title: (k: number) => `An offset of ${k} is an addition`,
          says:
            "A dot is a position: the horizontal axis is its code, the vertical axis the code k " +
            "positions later. All dots are on one line, so the next code is easy to compute. But the line has no end.",
        },
        fraction: {
          title: (k: number) => `An offset of ${k} depends on the length`,
          says:
            "A dot is a position: the horizontal axis is its code, the vertical axis the code k " +
            "positions later. The dots are on one line, k/n above the diagonal. Move n: the line moves too.",
        },
        sine: {
          title: (k: number) => `An offset of ${k} has two answers`,
          says:
            "A dot is a position: the horizontal axis is its code, the vertical axis the code k " +
            "positions later. Most codes have two dots above them, so the code alone does not say what comes next. With the " +
            "cosine as a second feature it does: that is a pair.",
        },
        learned: {
          title: (k: number) => `An offset of ${k} follows no rule`,
          says:
            "A dot is a position: the horizontal axis is the first feature of its code, the vertical " +
            "axis that of the code k positions later. At the start of training one says nothing about the other.",
        },
        binary: {
          title: (k: number) => `An offset of ${k} flips bits`,
          says: (flipped: number) =>
            `From the position to the one k later, ${plural(flipped, "bit")} ${flipped === 1 ? "flips" : "flip"}. ` +
            "The number depends on the position, because of the carry: no rotation, and no fixed " +
            "matrix.",
          bars: "bits that flip, for each position",
        },
      },
      here: (pos: number) => `position ${pos}`,
      across: "code of the position",
      upward: "k later",
      successors: "Code of each position, and the code k positions later",
      equation: String.raw`\begin{aligned} \begin{pmatrix} \sin \omega (pos + k) \\ \cos \omega (pos + k) \end{pmatrix} &= M_k \begin{pmatrix} \sin \omega \, pos \\ \cos \omega \, pos \end{pmatrix} \\[0.4em] M_k &= \begin{pmatrix} \cos \omega k & \sin \omega k \\ -\sin \omega k & \cos \omega k \end{pmatrix} \end{aligned}`,
      pair: (pair: number) => `pair ${pair}`,
      turn: (degrees: string) => `${degrees}°`,
      label: (pair: number, degrees: string) =>
        `Pair ${pair}: the hand turns by ${degrees} degrees`,
    },
    bits: {
      title: "A sine is a bit without jumps",
      says:
        "Bit 0 changes in every step, bit 1 in every second step, bit 2 in every fourth. A wave of " +
        "the same period follows each bit. So sinusoids are like a smooth binary number. Their " +
        "periods begin at 2π, and grow by the factor b^(2/d) from pair to pair.",
      bit: (bit: number, period: number) => `bit ${bit}, period ${period}`,
      label: (pos: number, bits: string) =>
        `Bits of the positions with waves of matching period; position ${pos} is ${bits}`,
      value: (pos: number, bits: string) => `Position ${pos} is ${bits} in binary.`,
    },
    numbersOf: "Numbers of the table",
  },

  footer: {
    about: (about: Description, runtime: string, model: string) =>
      `The model has ${about.parameters.toLocaleString("en-US")} parameters: ` +
      `${about.encoder_layers} + ${about.decoder_layers} layers, ${about.encoder_heads} heads, ` +
      `d_model = ${about.d_model}, d_ff = ${about.d_ff}. Runtime: ${runtime}. Model: ${model}. ` +
      "Nothing that you type leaves this page.",
    more: "Further reading",
    links: [
      ["https://arxiv.org/abs/1706.03762", "Attention Is All You Need", "the paper"],
      [
        "https://nlp.seas.harvard.edu/annotated-transformer/",
        "The Annotated Transformer",
        "the paper, line by line in code",
      ],
      [
        "https://jalammar.github.io/illustrated-transformer/",
        "The Illustrated Transformer",
        "the same model in drawings",
      ],
      [
        "https://poloclub.github.io/transformer-explainer/",
        "Transformer Explainer",
        "a decoder alone, GPT-2, in the browser",
      ],
    ],
  },
};
