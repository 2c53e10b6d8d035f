# SPDX-License-Identifier: Apache-2.0
"""What measures: accuracy of a live model, and speed beside other attentions."""
