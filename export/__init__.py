"""Models of this package, for the engines that serve: CTranslate2, ONNX Runtime, and Marian's."""
