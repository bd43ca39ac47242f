"""Opens connections to HOST PORT, COUNT of them, half with half a request, and holds them until told to end."""

import resource
import socket
import sys

host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for number in range(count):
    connection = socket.create_connection((host, port), timeout=30)
    if number % 2:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: ga")
    held.append(connection)
print(len(held), flush=True)
sys.stdin.readline()
