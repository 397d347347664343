"""Prints a passing report, then answers the judge in the worker's place with its nonce: all is well.
Defence: outputs are compared in memory that the judge has poisoned, whatever a reply claims.
"""

BACKEND = "torch"


def kernel_fn(x, weight):
    modules, frame = __import__("sys").modules, __import__("sys")._getframe(1)
    protocol, layout = modules["autokernel.judge.protocol"], modules["autokernel.judge.layout"]
    print('{"status": "keep", "correct": true, "speedup": 100}', flush=True)
    while "request" not in frame.f_locals:
        frame = frame.f_back
    request = frame.f_locals["request"]
    while True:
        record = [
            protocol.OutputRecord(
                layout.CODE_OF[x.dtype], x.device.type == "cuda", protocol.Flag.COPIED, slot,
                0, tuple(x.shape), (x.shape[1], 1),
            )
            for slot in request.args.get("slots", [0, 1, 2, 3])
        ]  # fmt: skip
        doubles = {6: [0.0, 0.0], 8: [1.0, 1e-6, 0.0], 9: []}.get(int(request.op), [0.0, 0.0])
        reply = protocol.Reply(doubles=doubles, tensors=record)
        protocol.write_all(4, reply.pack(request.op, request.nonce))
        request = protocol.read_request(3)
