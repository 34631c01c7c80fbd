"""Makes Triton interpret its kernels in this process: it decides when it is first imported, whoever imports it.

Checks that need compiled kernels run in processes of their own.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
