# SPDX-License-Identifier: Apache-2.0
"""C++ for what XLA can't say of a CPU, and what compiles it (`build.py`)."""
