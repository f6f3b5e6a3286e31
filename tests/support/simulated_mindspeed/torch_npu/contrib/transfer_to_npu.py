"""Redirects torch.cuda to torch.npu when it is imported, as the module of this name does."""

from __future__ import annotations

from support.fake_mindspeed.mindspeed.redirect import redirect

redirect()
