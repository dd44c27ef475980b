"""haproxy as a plain reverse proxy, when it is installed."""

import shutil
import subprocess

from lab import NotMeasured

from peers.peer import Peer, Site, Start

CONFIGURATION = """\
global
    nbthread 1
    maxconn 8000
defaults
    mode http
    timeout connect 2s
    timeout client 300s
    timeout server 300s
    option http-no-delay
frontend gateway
    bind 127.0.0.1:{port}
    default_backend workers
backend workers
    balance roundrobin
    http-reuse always
{servers}
"""


def prepare(site: Site) -> Start:
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise NotMeasured("haproxy is not installed (Debian: apt-get install haproxy)")
    path = site.directory / "haproxy.cfg"
    servers = "\n".join(f"    server worker{index} 127.0.0.1:{port}" for index, port in enumerate(site.worker_ports))
    path.write_text(CONFIGURATION.format(servers=servers, port=site.port))
    first_line = subprocess.run([program, "-v"], capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    return Start((program, "-db", "-f", str(path)), first_line.split()[2] if len(first_line.split()) > 2 else "unknown")


PEERS = (Peer("haproxy", "no decisions", prepare, by_default=False),)
