/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * Virtual queue pairs (VQPs) with the function names of KRCORE (ATC 2022): verbs to a node
 * without connection setup. Part of libkite, beside kite/lite.h, whose errors apply. Further
 * errors:
 *
 *  -EAGAIN           the function would have to wait
 *  -EADDRINUSE       the port has a listener
 *  -ECONNREFUSED     the port has no listener
 *  -ECONNRESET       the other end is closed
 *  -EBUSY            kr_connect, kr_bind: the queue is connected or bound, or the process has the
 *                    maximum of queues
 *  -ENOBUFS          KR_DEPTH requests are not popped, or KR_DEPTH receives are posted
 *  -ENOTCONN         the queue is not connected or accepted, or not bound
 *  -ENXIO            the RNIC supports no key for so much memory, or no atomic operations on memory
 *                    of the other node
 *  -ENOENT           no memory has the key
 *  -ECANCELED        completion: an earlier request failed
 *  -EINTR            kr_connect, kr_accept, kr_push, kr_pop, kr_pop_msgs: a signal handler ran
 *  -EINVAL           kr_pop_msgs: no receive is posted
 *
 * All functions are thread-safe. A program that has not called LT_join uses the first RNIC.
 * timeout_ms is the maximum wait in milliseconds: 0 does not wait, a negative value waits without
 * limit.
 *
 * The names have the prefix kr_. A program that defines KITE_KRCORE_NAMES before it includes this
 * header can also use those of the paper: queue, qconnect, qpush and so on.
 */
#ifndef KITE_KRCORE_H
#define KITE_KRCORE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Maximum requests of a queue that are not popped, and maximum posted receives. */
#define KR_DEPTH 256

/* Maximum requests of one kr_push. */
#define KR_PUSH_MAX 32

/* Rights of users other than the owner and root. Both together allow atomic operations. */
#define KR_MR_READ 1u
#define KR_MR_WRITE 2u

enum kr_op {
	KR_READ = 1, /* copies remote memory to local memory */
	KR_WRITE = 2,
	KR_COMPARE_SWAP = 3, /* 8 bytes; local memory receives the previous value */
	KR_FETCH_ADD = 4,
	KR_SEND = 5, /* sends a message, which the other end receives by kr_pop_msgs */
};

#define KR_SIGNALED 1u /* completes also on success */
#define KR_FENCED 2u /* starts after earlier reads and atomic operations have completed */
#define KR_IMMEDIATE 4u /* operand is immediate data of a SEND, or of a message after a WRITE */
#define KR_WRITTEN 8u /* message: a WRITE placed its bytes */

struct kr_request {
	uint64_t tag; /* copied to the completion */
	void *addr; /* local memory, registered by this process */
	uint64_t remote_addr; /* in the address space of its owner; 0 for KR_SEND */
	uint64_t operand; /* addend, value to swap in, or 32 bits of immediate data; else 0 */
	uint64_t expected; /* comparand; else 0 */
	uint32_t len; /* bytes, at least 1; 8 for atomic operations */
	uint32_t key; /* key of the local memory */
	uint32_t remote_key; /* key of the remote memory; 0 for KR_SEND */
	uint16_t op;
	uint16_t flags; /* any of KR_SIGNALED, KR_FENCED and KR_IMMEDIATE */
};

struct kr_completion {
	uint64_t tag;
	int status; /* 0, or a negative errno */
};

/* Receive buffer for a message. */
struct kr_receive {
	uint64_t tag;
	void *addr;
	uint32_t len;
	uint32_t key;
};

/* A received message. */
struct kr_message {
	uint64_t tag; /* tag of the receive that the message consumed */
	uint32_t len;
	uint32_t immediate; /* valid with KR_IMMEDIATE */
	uint32_t flags; /* any of KR_IMMEDIATE and KR_WRITTEN */
};

/*
 * Creates an unconnected queue. Returns its number, at least 1. A forked child cannot end queues
 * or registered memory of its parent.
 */
int kr_queue(void);

/*
 * Connects a queue to a node, and to the listener of a port there unless port is 0. No message is
 * sent to the node. Returns 0.
 */
int kr_connect(int qd, uint32_t node, uint32_t port);

/* Makes a queue the listener of a port of this node. Returns 0. */
int kr_bind(int qd, uint32_t port);

/* Accepts a queue that was connected to the port of this listener. Returns its number. */
int kr_accept(int qd, int timeout_ms);

/*
 * Closes a queue after functions that use it have returned. Posted requests complete first,
 * waiting requests are dropped, and the other end gets -ECONNRESET. Returns 0.
 */
int kr_close(int qd);

/*
 * Registers memory for the queues of this process, and for other processes that get its address
 * and key. others is any of KR_MR_*. The memory is pinned, and counts against RLIMIT_MEMLOCK.
 * Returns 0.
 */
int kr_reg_mr(void *addr, uint64_t size, uint32_t others, uint32_t *key);

/* Deregisters memory. No request of this process may use it any longer. Returns 0. */
int kr_dereg_mr(uint32_t key);

/*
 * Pushes requests: all of them, or none. They execute in order, but a write may overtake earlier
 * reads and atomics without KR_FENCED. Returns 0.
 */
int kr_push(int qd, const struct kr_request *list, int count);

/*
 * Returns a descriptor for poll(2). It is readable while any queue of this process has
 * completions, messages or queues to accept. It does not identify the queue: poll each with a
 * timeout of 0. The program must not read, write or close the descriptor.
 */
int kr_fd(void);

/* Pops up to count completions, in the order of their requests. Returns their number. */
int kr_pop(int qd, struct kr_completion *list, int count, int timeout_ms);

/*
 * Submits a request by an I/O queue of LT_queue (kite/lite.h), almost without system calls under
 * steady load. LT_wait and LT_poll return its completion, KR_SIGNALED or not. A rejected request
 * does not affect others. Requests to one VQP by one I/O queue execute in order. While KR_DEPTH
 * requests of the VQP are pending, further ones wait. Returns 0, or -ENOBUFS if the I/O queue is
 * full.
 */
int kr_push_async(int qd, int64_t lt_queue, const struct kr_request *request);

/* Posts receive buffers: all of them, or none. Messages consume them in order. Returns 0. */
int kr_push_recv(int qd, const struct kr_receive *list, int count);

/*
 * Receives up to count messages to buffers of kr_push_recv. Returns their number, -EINVAL if no
 * receive is posted, or -EMSGSIZE if the first buffer is too small for the first message, which
 * both remain.
 */
int kr_pop_msgs(int qd, struct kr_message *list, int count, int timeout_ms);

#ifdef KITE_KRCORE_NAMES
static inline int queue(void)
{
	return kr_queue();
}

static inline int qconnect(int qd, uint32_t node, uint32_t port)
{
	return kr_connect(qd, node, port);
}

static inline int qbind(int qd, uint32_t port)
{
	return kr_bind(qd, port);
}

static inline int qaccept(int qd, int timeout_ms)
{
	return kr_accept(qd, timeout_ms);
}

static inline int qclose(int qd)
{
	return kr_close(qd);
}

static inline int qreg_mr(void *addr, uint64_t size, uint32_t others, uint32_t *key)
{
	return kr_reg_mr(addr, size, others, key);
}

static inline int qdereg_mr(uint32_t key)
{
	return kr_dereg_mr(key);
}

static inline int qpush(int qd, const struct kr_request *list, int count)
{
	return kr_push(qd, list, count);
}

static inline int qpop(int qd, struct kr_completion *list, int count, int timeout_ms)
{
	return kr_pop(qd, list, count, timeout_ms);
}

static inline int qpush_recv(int qd, const struct kr_receive *list, int count)
{
	return kr_push_recv(qd, list, count);
}

static inline int qpop_msgs(int qd, struct kr_message *list, int count, int timeout_ms)
{
	return kr_pop_msgs(qd, list, count, timeout_ms);
}
#endif /* KITE_KRCORE_NAMES */

#ifdef __cplusplus
}
#endif

#endif /* KITE_KRCORE_H */
