# Sourced by the other scripts: make a virtual environment with this project in it, and activate it.
#
#   source scripts/environment.sh ENVIRONMENT EXTRAS CONSTRAINTS
#
# ENVIRONMENT  folder of the virtual environment; made when missing, brought up to date when pyproject.toml or the
#              constraints changed, left alone otherwise
# EXTRAS       optional dependencies of pyproject.toml, separated by commas
# CONSTRAINTS  file of versions
# PYTHON       (variable) the interpreter to make it with; by default the first of 3.11, 3.12 and 3.13 that is there

environment=$1 extras=$2 constraints=$3

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "No Python 3.11, 3.12 or 3.13 found (looked for python3.11, python3.12, python3.13, python3)." >&2
  echo "Install one, or name it: PYTHON=/path/to/python bash $0" >&2
  return 1
}

stamp="$environment/.installed"
wanted="$extras $(cat pyproject.toml "$constraints" | sha256sum)"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  python=$(find_python) || exit 1
  [ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
  "$environment/bin/python" -m pip install --disable-pip-version-check --constraint "$constraints" \
    --editable ".[$extras]"
  echo "$wanted" >"$stamp"
fi
# shellcheck disable=SC1091
source "$environment/bin/activate"
