/** The model in the browser: tokenizer, encoder and decoder, with every value of figure 1. */

import { Tokenizer } from "@huggingface/tokenizers";
import * as ort from "onnxruntime-web/wasm";
import loaderUrl from "onnxruntime-web/ort-wasm-simd-threaded.mjs?url";
import runtimeUrl from "onnxruntime-web/ort-wasm-simd-threaded.wasm?url";

const WEIGHTS_FILE = "weights.bin";

/** How often a translation with a mean log-probability of its tokens below the threshold is poor. */
export interface Calibration {
  threshold: number;
  /** Shares of poor translations below the threshold, and above it. */
  poor_below: number;
  poor_above: number;
  /** A translation with a lower chrF is poor. */
  chrf: number;
}

export interface Description {
  corpus: string | null;
  parameters: number;
  d_model: number;
  d_ff: number;
  d_k: number;
  encoder_layers: number;
  decoder_layers: number;
  encoder_heads: number;
  decoder_heads: number;
  vocab_size: number;
  position_encoding: string;
  position_base: number;
  start: number;
  ends: number[];
  suppressed: number[];
  num_beams: number;
  alpha: number;
  max_extra_tokens: number;
  calibration: Calibration | null;
  most_tokens: number;
  most_characters: number;
  tokens: string[];
  outputs: Record<string, string[]>;
  bytes: Record<string, number>;
}

/** A table of numbers of any shape, by rows. */
export interface Table {
  dims: readonly number[];
  data: Float32Array;
}

export type Values = Record<string, Table>;

/** A sentence with all values of the encoder. */
export interface Encoded {
  ids: number[];
  values: Values;
}

export class Model {
  private constructor(
    readonly about: Description,
    private readonly tokenizer: Tokenizer,
    private readonly encoder: ort.InferenceSession,
    private readonly decoder: ort.InferenceSession,
  ) {}

  /** Load the model from a folder beside the page. */
  static async load(folder: string, onProgress: (part: string) => void): Promise<Model> {
    const get = async (name: string) => {
      const response = await fetch(`${folder}/${name}`);
      if (!response.ok) throw new Error(`${name}: ${response.status}`);
      return response;
    };
    const json = async (name: string) => (await get(name)).json();
    const bytes = async (name: string) => new Uint8Array(await (await get(name)).arrayBuffer());
    ort.env.wasm.numThreads = 1;
    ort.env.logLevel = "error";
    ort.env.wasm.wasmPaths = {
      mjs: new URL(loaderUrl, import.meta.url).href,
      wasm: new URL(runtimeUrl, import.meta.url).href,
    };
    onProgress("model");
    const [about, tokens, settings, encoder, decoder, weights] = await Promise.all([
      json("model.json") as Promise<Description>,
      json("tokenizer.json"),
      json("tokenizer_config.json"),
      bytes("encoder.onnx"),
      bytes("decoder.onnx"),
      bytes(WEIGHTS_FILE),
    ]);
    onProgress("runtime");
    const externalData = [{ path: WEIGHTS_FILE, data: weights }];
    const options = { executionProviders: ["wasm"], externalData };
    const first = await ort.InferenceSession.create(encoder, options);
    const second = await ort.InferenceSession.create(decoder, options);
    return new Model(about, new Tokenizer(tokens, settings), first, second);
  }

  /** Return the token ids of a sentence, with the end token. */
  tokenize(text: string): number[] {
    return Array.from(this.tokenizer.encode(text).ids);
  }

  /** Return the text of token ids, without special tokens. */
  detokenize(ids: number[]): string {
    return ids.length ? this.tokenizer.decode(ids, { skip_special_tokens: true }) : "";
  }

  /** Return the name of a token for pictures. */
  nameOf(id: number): string {
    return this.about.tokens[id] ?? `#${id}`;
  }

  /** Compute all values of the encoder for one sentence. */
  async encode(ids: number[]): Promise<Encoded> {
    const values = await run(this.encoder, { input_ids: whole([ids]) });
    return { ids, values };
  }

  /** Return the memory: the output of the last encoder layer. */
  memoryOf(encoded: Encoded): Table {
    return encoded.values[this.about.outputs["encoder.onnx"].at(-1)!];
  }

  /** Compute all values of the decoder for one prefix. */
  async decode(prefix: number[], encoded: Encoded): Promise<Values> {
    return run(this.decoder, this.inputs([prefix], encoded));
  }

  /** Return log-probabilities of the token after each prefix; all prefixes have one length. */
  async nextLogProbs(prefixes: number[][], encoded: Encoded): Promise<Float64Array[]> {
    const { logits } = await run(this.decoder, this.inputs(prefixes, encoded), ["logits"]);
    const [, length, size] = logits.dims;
    return prefixes.map((_, row) => {
      const from = (row * length + length - 1) * size;
      return logSoftmax(logits.data.subarray(from, from + size));
    });
  }

  private inputs(prefixes: number[][], encoded: Encoded) {
    const { data, dims } = this.memoryOf(encoded);
    const memory = new Float32Array(prefixes.length * data.length);
    prefixes.forEach((_, row) => memory.set(data, row * data.length));
    return {
      input_ids: whole(prefixes),
      memory: new ort.Tensor("float32", memory, [prefixes.length, dims[1], dims[2]]),
    };
  }
}

function whole(rows: number[][]): ort.Tensor {
  const flat = BigInt64Array.from(rows.flat(), BigInt);
  return new ort.Tensor("int64", flat, [rows.length, rows[0].length]);
}

async function run(
  session: ort.InferenceSession,
  feeds: Record<string, ort.Tensor>,
  names?: string[],
): Promise<Values> {
  const found = names ? await session.run(feeds, names) : await session.run(feeds);
  const values: Values = {};
  for (const [name, tensor] of Object.entries(found))
    values[name] = { dims: tensor.dims, data: tensor.data as Float32Array };
  return values;
}

/** Return the logarithms of the softmax of one row of logits. */
export function logSoftmax(logits: Float32Array): Float64Array {
  let highest = -Infinity;
  for (const logit of logits) highest = Math.max(highest, logit);
  let sum = 0;
  for (const logit of logits) sum += Math.exp(logit - highest);
  const shift = highest + Math.log(sum);
  return Float64Array.from(logits, (logit) => logit - shift);
}

/** A matrix of one head or of one batch row: [rows, columns] within a larger table. */
export function matrixOf(table: Table, head?: number): Table {
  const dims = table.dims.slice(-2);
  if (table.dims.length === 2) return table;
  const size = dims[0] * dims[1];
  const from = (head ?? 0) * size;
  return { dims, data: table.data.subarray(from, from + size) };
}
