"""The process that a test starts in the place of an interpreter: hands on all that it has, and waits for the fork.

    python -IS fork_start.py ADDRESS [OPTIONS of forking.py] ARGS

It imports next to nothing: hundreds of it are started.
"""

import _socket
import array
import marshal
import os
import signal
import sys

address, *arguments = sys.argv[1:]
given = [0, 1, 2]
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        if number > 2 and os.get_inheritable(number):  # what `multiprocessing` hands on to those that it spawns
            given.append(number)
    except OSError:  # the listing's own
        pass
server = _socket.socket(_socket.AF_UNIX)
server.connect(f"\0{address}")
request = marshal.dumps((given, arguments, os.getcwd(), dict(os.environ)))
files = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", given))
server.sendmsg([len(request).to_bytes(4, "little")], [files])
server.sendall(request)
pid = int.from_bytes(server.recv(4), "little")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
server.settimeout(1)  # Python hears of a signal that comes just before the call only once that is over
while True:
    try:
        code = int.from_bytes(server.recv(4), "little", signed=True)
        break
    except TimeoutError:
        pass
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
