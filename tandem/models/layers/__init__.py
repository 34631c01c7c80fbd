"""The parts of a decoder layer. Each takes its tensors by Hugging Face name and computes through `Kernels`."""
