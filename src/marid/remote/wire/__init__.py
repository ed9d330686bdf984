"""What travels between client and worker: requests, answers, tensors and programs as data, and the sockets."""
