/** Split a text into sentences. */

// a full stop after one of these words does not end a sentence
const ABBREVIATION = /\b(?:Mr|Mrs|Ms|Dr|Prof|St)\.\s*$/;

/** Return the sentences of a text, without the white space between them. */
export function sentencesOf(text: string): string[] {
  const sentences: string[] = [];
  let begun = "";
  for (const { segment } of new Intl.Segmenter("en", { granularity: "sentence" }).segment(text)) {
    begun += segment;
    if (ABBREVIATION.test(begun)) continue;
    sentences.push(begun.trim());
    begun = "";
  }
  return [...sentences, begun.trim()].filter(Boolean);
}
