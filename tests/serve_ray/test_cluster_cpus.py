"""The room for replicas on clusters and machines, against placing them one by one, without Ray."""

import socket
import threading
from contextlib import contextmanager

import pytest

from helpers.raising import assert_raises
from kvboost_edge.errors import BackendUnavailable, ConfigError
from kvboost_edge.serve_ray import cluster_cpus
from kvboost_edge.serve_ray.cluster_cpus import check_address, cpus_of_each


def test_cpus_default_to_an_even_share():
    assert cpus_of_each(2, None, [8]) == 4
    assert cpus_of_each(3, None, [8]) == 2
    assert cpus_of_each(2, 3, [8]) == 3
    assert cpus_of_each(2, None, [4] * 4) == 4
    assert cpus_of_each(2, None, [16, 4], free=6) == 3
    with pytest.raises(
        ConfigError, match=r"no machine of the cluster has 6 CPUs \(the largest has 4\)"
    ):
        cpus_of_each(2, 6, [4] * 4)
    for workers, threads in ((3, None), (2, 2)):
        with pytest.raises(ConfigError, match=rf"workers={workers} .* only 2 are available"):
            cpus_of_each(workers, threads, [2])
    with pytest.raises(
        ConfigError, match="workers=2 with 3 threads each need 6 CPUs, but only 5 are available"
    ):
        cpus_of_each(2, 3, [8], free=5)
    assert_raises(ConfigError, "but only 0 are available", cpus_of_each, 1, None, [])


@pytest.mark.parametrize("machines", [[3, 3], [5, 1], [2, 2, 2], [7, 1, 1], [1, 1, 1, 1, 1]])
def test_a_replica_fits_on_one_machine(machines):
    """Ray would wait forever for a replica that needs two machines. Each size is compared with
    placing replicas one by one.
    """

    def fit(workers, each):
        free = list(machines)
        for _ in range(workers):
            place = next((n for n, cpus in enumerate(free) if cpus >= each), None)
            if place is None:
                return False
            free[place] -= each
        return True

    for workers in range(1, sum(machines) + 1):
        found = cpus_of_each(workers, None, machines)
        assert fit(workers, found)
        assert not fit(workers, found + 1)
        for each in range(1, max(machines) + 1):
            if fit(workers, each):
                assert cpus_of_each(workers, each, machines) == each
            else:
                with pytest.raises(ConfigError, match=rf"workers={workers} with {each} threads"):
                    cpus_of_each(workers, each, machines)


@contextmanager
def listening(answer):
    """Run a server that sends `answer` to its first client and ends. With None it accepts but never
    answers.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = threading.Event()

        def serve():
            client, _ = listener.accept()
            with client:
                assert client.recv(1024)
                if answer is not None:
                    client.sendall(answer)
                else:
                    done.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program listens there"),
        (b"", "another program listens there"),
        (b"\0\0\0\4", "another program listens there"),
        (None, "timed out"),
    ],
)
def test_an_address_without_a_ray_head_fails_quickly(answer, reason, monkeypatch):
    monkeypatch.setattr(cluster_cpus, "_ANSWERING_SECONDS", 0.2 if answer is None else 60.0)
    with (
        listening(answer) as address,
        pytest.raises(BackendUnavailable, match=f"no Ray cluster answers.*{reason}"),
    ):
        check_address(address)


def test_an_http2_peer_is_accepted_as_a_head():
    with listening(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0]) + bytes(6)) as address:
        check_address(address)
    check_address("auto")


def test_with_tls_an_open_port_is_accepted(monkeypatch):
    """A head node with TLS answers only encrypted data, so the open port suffices. Without a
    listener the cluster does not exist.
    """
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        check_address(address)
    assert_raises(BackendUnavailable, "no Ray cluster answers there", check_address, address)


@pytest.mark.parametrize(
    "address", ["here", "ray://127.0.0.1:1", ":1", "127.0.0.1:", "127.0.0.1:x"]
)
def test_an_invalid_address_is_refused(address):
    assert_raises(ConfigError, "must be HOST:PORT", check_address, address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999999999"])
def test_a_closed_port_is_not_a_cluster(address):
    with pytest.raises(
        BackendUnavailable, match=f"ray_address='{address}': no Ray cluster answers there"
    ):
        check_address(address)
