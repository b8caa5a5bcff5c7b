"""Running a drafter: sessions (PyTorch, ONNX Runtime, TensorRT), the context cache and the draft step."""
