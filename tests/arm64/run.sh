#!/usr/bin/env bash
# The native path on emulated ARM processors: one with dot products (Cortex-A76), one without (Cortex-A72), and of the
# linear layers also one with i8mm (Ampere-1).
#
#   tests/arm64/run.sh make DIR            make an arm64 Debian in DIR: about 2 minutes, 1.2 GB; nothing where one stands
#                                          with all the packages that are needed
#   tests/arm64/run.sh test DIR RESULT     run the tests of tests/arm64/tests.txt there, on the first two processors, and
#                                          those of i8mm.txt on the third, and write what came out to the file RESULT
#   tests/arm64/run.sh run DIR CPU COMMAND...
#                                          run a command there, in a copy of this tree; CPU: cortex-a76, cortex-a72 or ampere1
#
# Needs root on Debian or Ubuntu; `make` also needs their packages debootstrap and qemu-user-static (it installs them)
# and Python packages for aarch64 from the package index. Emulation shows that results are right, never how fast they are.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
tree="$(cd "$here/../.." && pwd)"
# What the package needs, and what these tests need beside it.
packages="$(python3 -c '
import sys, tomllib
from pathlib import Path
print(*tomllib.loads(Path(sys.argv[1]).read_text())["project"]["dependencies"])' "$tree/pyproject.toml") gguf hypothesis pytest pytest-asyncio"
# Debian's packages beside its base system. gcc links kernel libraries.
system=python3,libgomp1,gcc

usage() {
    sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

need_root() {
    [ "$(id -u)" = 0 ] || { echo "tests/arm64/run.sh needs root: it calls chroot and mount" >&2; exit 1; }
}

# make DIR: Debian's packages and wheels for aarch64, unpacked here. Nothing is configured, so nothing runs under emulation.
make_root() {
    local dir="$1" package
    ! is_made "$dir" || return 0
    command -v apt-get >/dev/null || { echo "making the arm64 root needs Debian or Ubuntu (apt-get, debootstrap)" >&2; exit 1; }
    if ! command -v qemu-aarch64-static >/dev/null || ! command -v debootstrap >/dev/null; then
        apt-get update -qq
        apt-get install -y -qq qemu-user-static debootstrap binfmt-support >/dev/null
    fi
    mountpoint -q /proc/sys/fs/binfmt_misc || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    [ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || update-binfmts --enable qemu-aarch64
    if ! [ -x "$dir/usr/bin/gcc" ]; then
        debootstrap --foreign --arch=arm64 --variant=minbase --include="$system" bookworm "$dir" >/dev/null
        for package in "$dir"/var/cache/apt/archives/*.deb; do
            dpkg-deb --fsys-tarfile "$package" | tar -C "$dir" -x --skip-old-files --keep-directory-symlink
        done
        # In a container, debootstrap makes a link to the container's own /proc.
        [ ! -L "$dir/proc" ] || { rm "$dir/proc" && mkdir "$dir/proc"; }
        cp "$dir/usr/share/base-passwd/passwd.master" "$dir/etc/passwd"
        cp "$dir/usr/share/base-passwd/group.master" "$dir/etc/group"
        cp "$(command -v qemu-aarch64-static)" "$dir/usr/bin/"
    fi
    # shellcheck disable=SC2086 # a list of words
    python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-warn-conflicts --only-binary=:all: -c "$tree/constraints.txt" \
        --python-version 3.11 --implementation cp --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --upgrade \
        --target "$dir/usr/local/lib/python3.11/dist-packages" $packages
    echo "$system $packages" >"$dir/root/is-made"
}

# is_made DIR: with the packages that are wanted now.
is_made() {
    [ "$(cat "$1/root/is-made" 2>/dev/null)" = "$system $packages" ]
}

# copy_tree DIR: what is tested is this tree as it is now, without environments, caches and results,
# and the tests' tiny models, because making them takes torch.
copy_tree() {
    is_made "$1" || { echo "$1 holds no arm64 root with the packages needed: tests/arm64/run.sh make $1" >&2; exit 1; }
    mkdir -p "$1/src"
    find "$1/src" -mindepth 1 -maxdepth 1 -exec rm -rf {} +
    tar -C "$tree" -cf - --exclude='./.*' --exclude=__pycache__ --exclude=./benchmarks/results --exclude=./build --exclude=./dist --exclude=./site . | tar -C "$1/src" -xf -
    TQDM_DISABLE=1 PYTHONPATH="$tree:$tree/tests" "$tree/.venv/bin/python" "$here/models.py" "$1/src/models"
}

# run_in DIR CPU COMMAND...: in the copy, with mounts that end with the command.
run_in() {
    local dir="$1" cpu="$2" model="$2" implementer=0x41 part features
    shift 2
    case "$cpu" in
    cortex-a76) part=0xd0b features="fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp" ;;
    cortex-a72) part=0xd08 features="fp asimd evtstrm crc32 cpuid" ;;
    ampere1)
        # The emulator does not know it by name. LLVM does, and gives it i8mm, but not SVE.
        model=max,sve=off,sme=off implementer=0xc0 part=0xac3
        features="fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 asimddp sha512 asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg dcpodp flagm2 frint i8mm bf16 bti"
        ;;
    *) usage ;;
    esac
    mkdir -p "$dir/root/$cpu"
    # What a board with this processor says of itself: the emulator shows the file of the machine it runs on.
    for processor in 0 1; do
        printf 'processor\t: %s\nFeatures\t: %s\nCPU implementer\t: %s\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: %s\nCPU revision\t: 0\n\n' \
            "$processor" "$features" "$implementer" "$part"
    done >"$dir/root/$cpu/cpuinfo"
    # The emulated processor refuses what the real one does not have. Compiled kernels are kept for the next run.
    env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 PYTHONPATH=/src NUMBA_CACHE_DIR="/root/$cpu" TEST_MODELS=/src/models \
        QEMU_CPU="$model" CPU="$cpu" unshare --mount sh -c 'root=$1; shift
            mount -t proc proc "$root/proc" && mount --bind "$root/root/$CPU/cpuinfo" "$root/proc/cpuinfo" &&
            mount --rbind /dev "$root/dev" && exec chroot "$root" sh -c "cd /src && exec \"\$@\"" sh "$@"' sh "$dir" "$@"
}

# test_one DIR CPU LIST
test_one() {
    run_in "$1" "$2" python3 tests/arm64/describe.py
    run_in "$1" "$2" python3 -m pytest -q --no-header -p no:cacheprovider -p no:faulthandler --durations=5 "@tests/arm64/$3"
}

# test_all DIR RESULT: two processors side by side, then the third; fails if a test failed on one of them.
test_all() {
    local dir="$1" result="$2" status=0 first second
    test_one "$dir" cortex-a76 tests.txt >"$result.a76" 2>&1 &
    first=$!
    test_one "$dir" cortex-a72 tests.txt >"$result.a72" 2>&1 &
    second=$!
    wait "$first" || status=$?
    test_one "$dir" ampere1 i8mm.txt >"$result.i8mm" 2>&1 || status=$?
    wait "$second" || status=$?
    {
        echo "commit $(git -C "$tree" rev-parse --short HEAD), $(date -u +%F); left out, for time under emulation:"
        sed -n 's/^--\(ignore\|deselect\)=/    /p' "$here/tests.txt"
        echo && cat "$result.a76" && echo && cat "$result.a72" && echo && cat "$result.i8mm"
    } >"$result"
    rm "$result.a76" "$result.a72" "$result.i8mm"
    cat "$result"
    return "$status"
}

main() {
    [ $# -ge 2 ] || usage
    need_root
    local what="$1" dir="$2"
    shift 2
    case "$what" in
    make) make_root "$dir" ;;
    run) [ $# -ge 2 ] || usage; copy_tree "$dir"; run_in "$dir" "$@" ;;
    test) [ $# -eq 1 ] || usage; copy_tree "$dir"; test_all "$dir" "$1" ;;
    *) usage ;;
    esac
}

main "$@"
exit
