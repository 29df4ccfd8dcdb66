#!/usr/bin/env bash
# Installs Debian's or Ubuntu's Chromium for tests/integration/dashboard/test_page.py, if no browser is there and this is root.
# Fails only where it tried: without a browser these tests are skipped, and say so.
set -euo pipefail
for name in ${GRADWIRE_BROWSER:-} chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" > /dev/null; then
        echo "$name is there: $(command -v "$name")"
        exit 0
    fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "There is no Chromium, so the tests of the page will be skipped. Install one, for instance: sudo apt-get install chromium"
    exit 0
fi
apt-get update -q
apt-get install -q -y --no-install-recommends chromium
