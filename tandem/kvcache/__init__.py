"""Who owns which block. No tensors here: after every public call `free + cached + used == total`."""
