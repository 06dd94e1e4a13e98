#!/bin/sh
# A redis-server for the tests, unpacked from Debian's or Ubuntu's packages into the folder $1. Nothing is installed or
# started, and root is not needed. The program in redis-tools is the server, too: it goes by the name it is called.
set -eu
folder="$(mkdir -p "$1/archives/partial" && cd "$1" && pwd)"

fetch() {
    apt-get install -qq -y --no-install-recommends --download-only \
        -o Debug::NoLocking=1 -o Dir::Cache="$folder" "$@" redis-tools >"$folder/log" 2>&1
}

# The machine's package lists may be missing or old. Lists of our own need no root.
refresh() {
    lists="$folder/lists"
    mkdir -p "$lists/partial"
    apt-get update -qq -o Debug::NoLocking=1 -o Dir::State::lists="$lists" -o Dir::Cache="$folder" \
        >"$folder/log" 2>&1
}

fetch || { refresh && fetch -o Dir::State::lists="$lists"; } || { cat "$folder/log" >&2; exit 1; }
for package in "$folder"/archives/*.deb; do
    dpkg -x "$package" "$folder"
done
rm -rf "$folder/archives" "$folder/lists" "$folder"/*.bin "$folder/log"
