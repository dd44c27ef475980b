"""nginx as a plain reverse proxy: no keys, no queue, no log. The practical floor."""

import shutil
import subprocess

from lab import NotMeasured

from peers.peer import Peer, Site, Start

CONFIGURATION = """\
user root root;
daemon off;
worker_processes 1;
pid {directory}/nginx.pid;
error_log {directory}/error.log warn;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    client_max_body_size 32m;
    keepalive_requests 1000000000;
    upstream workers {{
{servers}
        keepalive 256;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://workers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 300s;
        }}
    }}
}}
"""


def prepare(site: Site) -> Start:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise NotMeasured("nginx is not installed (Debian: apt-get install nginx-light)")
    path = site.directory / "nginx.conf"
    servers = "\n".join(f"        server 127.0.0.1:{port};" for port in site.worker_ports)
    path.write_text(CONFIGURATION.format(directory=site.directory, servers=servers, port=site.port))
    version = (
        subprocess.run([program, "-v"], capture_output=True, text=True, check=False).stderr.rpartition("/")[2].strip()
    )
    return Start((program, "-c", str(path), "-p", str(site.directory)), version)


PEERS = (Peer("nginx", "no decisions: the practical floor", prepare),)
