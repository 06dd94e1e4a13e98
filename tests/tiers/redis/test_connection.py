"""Servers that are down, die, stop, are full, or want passwords or TLS: the state has one line,
without an error or a secret.
"""

import logging
import subprocess

import pytest

from helpers.tiers.redis_cases import Clock, chain, filled, hashes_of, opened, reads, stored_keys
from helpers.tiers.redis_servers import running_redis

MIB = 1 << 20


def lines(caplog):
    """Return the warnings that the tier logged."""
    return [
        r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "redis" in r.name
    ]


def test_a_server_down_at_start_is_used_once_it_is_up(caplog):
    blocks, payloads = chain(3)
    clock = Clock()
    with running_redis() as server:
        server.kill()
        tier = opened(server.url, clock=clock)
        assert not tier.ping()
        assert (tier.write(blocks, payloads), reads(tier, blocks, payloads)) == (0, 0)
        assert tier.stat().state == f"{server.url}?db=0: Connection refused"
        assert (tier.stat().errors, tier.stat().not_written, tier.stat().missing) == (3, 3, 3)
        assert tier.holds(blocks[0].prefix_hash) is False
        assert not tier.stat().writable
        with running_redis(folder=server.folder):
            assert tier.write(blocks, payloads) == 0, "the server must not be used for 30 s"
            assert tier.stat().errors == 3
            clock.now += 31
            assert tier.holds(blocks[0].prefix_hash) is None
            assert tier.write(blocks, payloads) == 3
            assert reads(tier, blocks, payloads) == 3
            assert (tier.stat().state, tier.stat().writable) == ("", True)
    assert len(lines(caplog)) == 1


def test_a_restarted_empty_server_is_used_again():
    blocks, payloads = chain(3)
    with running_redis() as server:
        tier = opened(server.url)
        assert tier.write(blocks, payloads) == 3
        server.kill()
        assert reads(tier, blocks, payloads) == 0
        with running_redis(folder=server.folder):
            assert reads(tier, blocks, payloads) == 0
            assert tier.write(blocks, payloads) == 3
            assert reads(tier, blocks, payloads) == 3


def test_a_server_that_dies_during_a_pipeline_is_a_miss():
    blocks, payloads = chain(2, 20 * MIB)
    with running_redis() as server:
        tier = opened(server.url)
        real = tier._server._client.pipeline
        begun = []

        def pipeline(**options):
            begun.append(1)
            if len(begun) == 3:  # the lengths, 8 MiB, and the rest
                server.kill()
            return real(**options)

        tier._server._client.pipeline = pipeline
        assert tier.write(blocks, payloads) == 0
        assert reads(tier, blocks, payloads) == 0


def test_a_hanging_server_costs_at_most_three_seconds(caplog):
    clock = Clock()
    with running_redis() as server:
        tier, blocks, payloads = filled(server.url, 2, clock=clock)
        with server.stopped():
            assert [reads(tier, blocks, payloads) for _ in range(50)] == [0] * 50
            assert tier.stat().errors == 3
            assert tier.stat().state.endswith(": no answer within 1 s")
        clock.now += 31
        assert reads(tier, blocks, payloads) == 2, (
            "a late answer must not be taken for that of another command"
        )
    assert len(lines(caplog)) == 1


def test_a_full_server_is_read_and_written_again_later(caplog):
    blocks, payloads = chain(40, 200_000)
    clock = Clock()
    with (
        running_redis("--maxmemory", "6mb", "--maxmemory-policy", "noeviction") as server,
        server.client() as client,
    ):
        tier = opened(server.url, clock=clock)
        assert tier.ping()
        assert "noeviction" in tier.stat().state
        written = tier.write(blocks, payloads)
        assert 0 < written < 40
        stat = tier.stat()
        assert (stat.writable, stat.not_written, stat.written_blocks) == (
            False,
            40 - written,
            written,
        )
        assert "allkeys-lru" in stat.state
        assert reads(tier, blocks, payloads) == written
        client.config_set("maxmemory", "0")
        assert tier.write(blocks, payloads) == 0, "the server must not be used for 30 s"
        clock.now += 31
        assert tier.write(blocks, payloads) == 40
        assert reads(tier, blocks, payloads) == 40
        assert tier.stat().writable
    assert len(lines(caplog)) == 1


@pytest.fixture(scope="module")
def with_users():
    """Server with the users a (everything), w (as documented), r (read only) and n (nothing); there
    is none without a password.
    """
    rules = {
        "a": "on >pass-a-phrase ~kvb:* +@all",
        "r": "on >pass-r-phrase ~kvb:* +getrange +strlen +exists",
        "w": "on >pass-w-phrase ~kvb:* +getrange +strlen +exists +set +expire +unlink",
        "n": "on >pass-n-phrase",
    }
    with (
        running_redis("--requirepass", "pass-of-default") as server,
        server.client(password="pass-of-default") as client,
    ):
        for name, rule in rules.items():
            client.execute_command("ACL", "SETUSER", name, *rule.split())
        yield server


def as_user(server, user, password):
    return server.url.replace("unix://", f"unix://{user}:{password}@")


def test_users_with_permissions_read_and_write(with_users):
    blocks, payloads = chain(2)
    writer = opened(as_user(with_users, "a", "pass-a-phrase"))
    reader = opened(as_user(with_users, "r", "pass-r-phrase"))
    named = opened(as_user(with_users, "w", "pass-w-phrase"))
    default = opened(with_users.url, environment={"KVBOOST_EDGE_REDIS_PASSWORD": "pass-of-default"})
    assert writer.write(blocks, payloads) == 2
    for tier in (writer, reader, default):
        assert reads(tier, blocks, payloads) == 2
    named.drop(hashes_of(blocks))
    assert reads(named, blocks, payloads) == 0
    assert named.write(blocks, payloads) == 2
    named.touch(hashes_of(blocks))
    assert reads(named, blocks, payloads) == 2
    assert (named.stat().errors, named.stat().state) == (0, "")


def test_a_read_only_user_keeps_reading(with_users, caplog):
    blocks, payloads = chain(2, seed=5)
    writer = opened(as_user(with_users, "a", "pass-a-phrase"))
    writer.write(blocks[:1], payloads[:1])
    reader = opened(as_user(with_users, "r", "pass-r-phrase"))
    for _ in range(5):
        assert reader.write(blocks, payloads) < 2
        assert reads(reader, blocks, payloads) == 1
    assert not reader.stat().writable
    assert reader.stat().state.endswith("the user lacks a permission")
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("a", "hunter2-hunter2", "rejects the user or password"),
        ("x", "hunter2-hunter2", "rejects the user"),
        ("n", "pass-n-phrase", "lacks a permission"),
        (None, None, "or requires one"),
    ],
)
def test_a_wrong_password_is_logged_without_repeating_it(user, password, words, with_users, caplog):
    blocks, payloads = chain(1)
    caplog.set_level(logging.DEBUG)
    url = with_users.url if user is None else as_user(with_users, user, password)
    tier = opened(url)
    assert not tier.ping()
    for _ in range(4):
        assert (tier.write(blocks, payloads), reads(tier, blocks, payloads)) == (0, 0)
    assert words in tier.stat().state
    said = [repr(tier), tier.stat().state, *(record.getMessage() for record in caplog.records)]
    assert not any("hunter2" in text or "phrase" in text for text in said)


def test_a_cluster_server_is_reported_as_unsupported():
    blocks, payloads = chain(2)
    with running_redis("--cluster-enabled", "yes", "--cluster-port", "PORT") as server:
        tier = opened(server.url)
        assert (tier.write(blocks, payloads), reads(tier, blocks, payloads)) == (0, 0)
        assert tier.stat().state.endswith("part of a cluster, which is not supported")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Folder of ca.pem, server.pem for localhost, other.pem for another host, and the CA of a
    stranger.
    """
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(command):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)

    for ca in ("ca", "stranger"):
        openssl(
            f"req -x509 -newkey rsa:2048 -nodes -keyout {ca}.key -out {ca}.pem -days 2 "
            f"-subj /CN={ca} -addext keyUsage=critical,keyCertSign"
        )
    for name, host in (("server", "localhost"), ("other", "elsewhere.example")):
        openssl(f"req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}")
        (folder / "ext").write_text(f"subjectAltName=DNS:{host}\nauthorityKeyIdentifier=keyid\n")
        openssl(
            f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
            f"-out {name}.pem -extfile ext"
        )
    return folder


def tls(folder, name):
    options = (
        "--port 0 --tls-port PORT --tls-cert-file {0}/{1}.pem --tls-key-file {0}/{1}.key "
        "--tls-ca-cert-file {0}/ca.pem --tls-auth-clients no"
    )
    return [option.format(folder, name) for option in options.split()]


def test_tls_is_verified(certificates, caplog):
    blocks, payloads = chain(2, 3 * MIB)
    with running_redis(*tls(certificates, "server"), tcp=True) as server:
        url = f"rediss://localhost:{server.port}?ssl_ca_certs={certificates}"
        tier = opened(f"{url}/ca.pem")
        assert tier.write(blocks, payloads) == 2
        assert reads(tier, blocks, payloads) == 2
        for wrong in (f"{url}/stranger.pem", f"rediss://localhost:{server.port}"):
            tier = opened(wrong)
            assert reads(tier, blocks, payloads) == 0
            assert "certificate is not trusted" in tier.stat().state
        plain = opened(f"redis://localhost:{server.port}")
        assert reads(plain, blocks, payloads) == 0
        assert plain.stat().state
        with server.client() as client:
            assert len(stored_keys(client)) == 8
    with running_redis(*tls(certificates, "other"), tcp=True) as server:
        tier = opened(f"rediss://localhost:{server.port}?ssl_ca_certs={certificates}/ca.pem")
        assert reads(tier, blocks, payloads) == 0
        assert "certificate is not trusted" in tier.stat().state
