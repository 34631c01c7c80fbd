"""GGUF's architectures by family. Each `Architecture` here is a row of the table in `tandem.models.gguf.architectures`:
it says what each tensor becomes in a Hugging Face checkpoint (`TargetTensor`), and reads the metadata keys that only
that architecture has into a `config.json`. `base` has the classes and what families share.
"""
