"""Control groups of both versions, in a directory made by the test."""

import pytest

from kvboost_edge.host.cgroup import MemoryLimit, cpu_quota, memory_limit

GIB = 1 << 30
MOUNT_V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"


def machine(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_version_2_uses_the_lowest_limit_of_the_parents(tmp_path):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/app\n",
            "proc/self/mountinfo": MOUNT_V2,
            "sys/fs/cgroup/user/app/memory.max": "max\n",
            "sys/fs/cgroup/user/app/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/user/memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\n",
            "sys/fs/cgroup/user/cpu.max": "150000 100000\n",
        },
    )
    assert memory_limit(root) == MemoryLimit(4 * GIB, 2 * GIB)
    assert memory_limit(root).free == 2 * GIB
    assert cpu_quota(root) == 1.5


def test_version_2_in_a_container_reads_the_root(tmp_path):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": MOUNT_V2,
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": "1000\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
        },
    )
    assert memory_limit(root) == MemoryLimit(GIB, 1000)
    assert cpu_quota(root) == 0.5


def test_version_1_in_a_container_strips_the_mount_root(tmp_path):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc/inner\n0::/\n",
            "proc/self/mountinfo": (
                "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            ),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 4096\n",
            "sys/fs/cgroup/cpu/inner/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/inner/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        },
    )
    assert memory_limit(root) == MemoryLimit(2 * GIB, GIB - 4096)
    assert cpu_quota(root) == 2.0


def test_version_1_without_a_limit(tmp_path):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "proc/self/mountinfo": "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert memory_limit(root) is None


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "nonsense\n0::/../..\n", "proc/self/mountinfo": f"short\n{MOUNT_V2}"},
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": MOUNT_V2,
            "sys/fs/cgroup/memory.max": "words",
            "sys/fs/cgroup/cpu.max": "1 2 3",
        },
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": MOUNT_V2,
            "sys/fs/cgroup/cpu.max": "100 0",
        },
    ],
)
def test_without_files_there_is_no_limit(tmp_path, files):
    root = machine(tmp_path, files)
    assert memory_limit(root) is None
    assert cpu_quota(root) is None


def test_usage_above_the_limit_leaves_0_bytes_free():
    assert MemoryLimit(10, 20).free == 0
