"""Parts of a decoder layer. Each computes one spec of `tandem.architecture`, with `Kernels` and the spec's tensors."""
