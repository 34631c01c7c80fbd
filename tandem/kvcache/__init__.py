"""The owners of blocks. No tensors here: after every public call `free + cached + used == total`."""
