"""Export models to other inference engines: CTranslate2, ONNX Runtime and Marian."""
