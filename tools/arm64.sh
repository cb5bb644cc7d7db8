#!/bin/bash
# Builds and tests a copy of this tree as aarch64 on an x86-64 Debian: no chroot, no binfmt, no multiarch.
# Python, its wheels and the tests are emulated; the compiler is a native cross compiler.
#
#   tools/arm64.sh CACHE "CPU[:ISA]..." [pytest arguments]
#
# The CPUs are QEMU's: cortex-a53 (plain NEON), cortex-a76 (+ dotprod), max (everything); ISA is what must be chosen
# there. CACHE keeps Debian's arm64 Python and the aarch64 wheels from run to run. Once, as root:
#   apt-get install -y --no-install-recommends qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross
set -euo pipefail
CACHE=$(mkdir -p "${1:?a cache folder}" && realpath "$1")
CPUS=${2:?the CPU models, and what each must choose}
shift 2
cd "$(dirname "$0")/.."
ROOT=$CACHE/root SITE=$CACHE/site TREE=$CACHE/tree

if [ ! -e "$CACHE/root.done" ]; then # Debian's arm64 Python, unpacked in a folder
    rm -rf "$ROOT" "$CACHE/apt"
    A=$CACHE/apt
    mkdir -p "$A"/{lists/partial,archives/partial,parts} "$ROOT"
    : > "$A/status"
    cp /etc/apt/sources.list.d/debian.sources "$A/parts/"
    apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State="$A"
        -o Dir::State::Lists="$A/lists" -o Dir::State::status="$A/status" -o Dir::Cache="$A"
        -o Dir::Etc::sourceparts="$A/parts" -o Dir::Etc::sourcelist=/dev/null -o APT::Install-Recommends=false
        -o Debug::NoLocking=true -o APT::Sandbox::User=root)
    "${apt[@]}" update
    "${apt[@]}" -y --download-only install python3 libstdc++6
    for deb in "$A"/archives/*.deb; do dpkg -x "$deb" "$ROOT"; done
    touch "$CACHE/root.done"
fi
version=$(basename "$(readlink "$ROOT/usr/bin/python3")")
version=${version#python}

python3 tools/requirements.py | sort > "$CACHE/wanted"
if ! cmp -s "$CACHE/wanted" "$CACHE/installed"; then # aarch64 wheels, unpacked in a folder
    rm -rf "$SITE"
    python3 -m pip install --target "$SITE" --only-binary=:all: --implementation cp --python-version "$version" \
        --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 --platform any -r "$CACHE/wanted"
    cp "$CACHE/wanted" "$CACHE/installed"
fi

# A copy: the abi3 extension has the same file name on both machines.
rm -rf "$TREE"
mkdir -p "$TREE"
git ls-files -co --exclude-standard | tar cT - | tar xC "$TREE"
cd "$TREE"
_PYTHON_HOST_PLATFORM=linux-aarch64 CC=aarch64-linux-gnu-gcc LDSHARED="aarch64-linux-gnu-gcc -shared" \
    "${PYTHON:-python3}" setup.py -q build_ext --inplace

for level in $CPUS; do
    cpu=${level%:*} isa=
    if [[ $level == *:* ]]; then isa=${level#*:}; fi
    echo "== $cpu $isa"
    python="qemu-aarch64-static -cpu $cpu -L $ROOT $ROOT/usr/bin/python$version"
    PYTHONPATH=$SITE:$TREE PYTHONDONTWRITEBYTECODE=1 $python -c "import sys, kda
print(kda.isas())
sys.exit('$isa' not in ('', kda.runtime.chosen_isa()))"
    # unquoted: a command and its arguments, by which tests start interpreters too
    PYTHONPATH=$SITE:$TREE PYTHONDONTWRITEBYTECODE=1 KDA_TEST_PYTHON=$python $python -m pytest -p no:cacheprovider "$@"
done
