#!/usr/bin/env bash
# GPU tests; also where vLLM lies on PYTHONPATH instead of in .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m pytest tests/gpu "$@"
