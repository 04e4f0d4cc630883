"""Export models to other inference engines: CTranslate2, ONNX Runtime, transformers.js, Marian."""
