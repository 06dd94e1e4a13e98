"""The slowest test files according to `make test-times`; workers run them first."""

from __future__ import annotations

LONG = (
    "tests/engine/test_invariance.py",
    "tests/server/http/page/test_live.py",
    "tests/server/http/page/test_modelsview.py",
    "tests/server/http/page/test_chat.py",
    "tests/server/http/page/test_prompts.py",
    "tests/server/http/page/test_models.py",
    "tests/server/http/page/test_chats.py",
    "tests/server/http/page/test_axe.py",
    "tests/server/http/page/test_toolcalls.py",
    "tests/server/http/page/test_safety.py",
    "tests/server/http/page/test_progress.py",
    "tests/server/http/page/test_palette.py",
    "tests/server/http/page/test_presets.py",
    "tests/server/http/page/test_modules.py",
    "tests/docs_site/test_site.py",
    "tests/server/api/compat/test_contract.py",
    "tests/kernels/linear/test_amx.py",
    "tests/engine/schedule/test_native_schedules.py",
    "tests/runners/native/test_long.py",
    "tests/engine/test_end_to_end.py",
    "tests/runners/torch/test_families.py",
    "tests/cli/test_app.py",
    "tests/test_platforms.py",
    "tests/docs_site/test_browser.py",
    "tests/server/test_serve.py",
    "tests/tiers/disk/test_following.py",
    "tests/server/test_lifecycle.py",
    "tests/test_readme.py",
    "tests/kernels/linear/test_every_form.py",
    "tests/kernels/linear/test_forms.py",
    "tests/server/models/test_on_demand.py",
    "tests/runners/native/test_kernel_library.py",
    "tests/engine/schedule/test_random_schedules.py",
    "tests/server/http/test_limits.py",
    "tests/engine/offload/test_redis.py",
    "tests/cli/test_batch.py",
    "tests/kvcache/test_state_machine.py",
    "tests/text/test_template_limits.py",
    "tests/tiers/disk/test_faults.py",
    "tests/tiers/redis/test_connection.py",
    "tests/text/turns/test_call_grammar.py",
)
_PLACES = {name: place for place, name in enumerate(LONG)}


def place_of(test: str) -> int:
    """Return the position of a test's file in the order of a run. All unlisted files have the same
    one.
    """
    return _PLACES.get(test.partition("::")[0], len(LONG))
