/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * Virtual queue pairs with KRCORE's names (ATC 2022): verbs to a node, without a connection to wait
 * for. In libkite, beside kite/lite.h, whose list of errors holds here, too, and moreover:
 *
 *  -EAGAIN           nothing is there to be taken now
 *  -EADDRINUSE       somebody listens at the port
 *  -ECONNREFUSED     nobody listens at the port
 *  -ECONNRESET       the other end has ended
 *  -EBUSY            kr_connect, kr_bind: the queue was connected or bound before, or there are as
 *                    many as a process may have
 *  -ENOBUFS          KR_DEPTH requests were not popped, or as many receives are posted
 *  -ENOTCONN         the queue is neither connected nor accepted, or not bound, as it should be
 *  -ENXIO            an RNIC has no key to so much memory, or no atomic operations for that of
 *                    the other node
 *  -ENOENT           no memory of that key
 *  -ECANCELED        of a completion: a request before it failed
 *  -EINTR            kr_connect, kr_accept, kr_push, kr_pop, kr_pop_msgs: a signal came
 *  -EINVAL           kr_pop_msgs: there is no place
 *
 * A queue is for several threads at once. A program that has not called LT_join uses the first
 * RNIC. timeout_ms is the maximum wait in milliseconds: 0 returns at once, a negative value waits
 * without limit.
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

/* Requests of a queue that are not popped, and receives that are posted. */
#define KR_DEPTH 256

/* Most requests of one kr_push. */
#define KR_PUSH_MAX 32

/* What other users than the owner and root may do with memory; both allow atomic operations. */
#define KR_MR_READ 1u
#define KR_MR_WRITE 2u

enum kr_op {
	KR_READ = 1, /* from the remote memory to the local */
	KR_WRITE = 2,
	KR_COMPARE_SWAP = 3, /* of 8 bytes; what was there goes to the local memory */
	KR_FETCH_ADD = 4,
	KR_SEND = 5, /* a message for the other end, which takes it by kr_pop_msgs */
};

#define KR_SIGNALED 1u /* it has a completion not only when it fails */
#define KR_FENCED 2u /* reads and atomic operations before it end first */
#define KR_IMMEDIATE 4u /* operand is said with a SEND, or after a WRITE */
#define KR_WRITTEN 8u /* of a message: its bytes were written before */

struct kr_request {
	uint64_t tag; /* its completion has it */
	void *addr; /* local memory, of a key of this process */
	uint64_t remote_addr; /* as its owner has it; of KR_SEND 0 */
	uint64_t operand; /* what to add, or to swap in, or 32 bits to say; else 0 */
	uint64_t expected; /* what to compare with; else 0 */
	uint32_t len; /* bytes; 8 of atomic operations */
	uint32_t key; /* of the local memory */
	uint32_t remote_key; /* of the remote memory; of KR_SEND 0 */
	uint16_t op;
	uint16_t flags; /* any of KR_SIGNALED, KR_FENCED and KR_IMMEDIATE */
};

struct kr_completion {
	uint64_t tag;
	int status; /* 0, or a negative errno */
};

/* Where a message is wanted. */
struct kr_receive {
	uint64_t tag;
	void *addr;
	uint32_t len;
	uint32_t key;
};

/* A message that was received. */
struct kr_message {
	uint64_t tag; /* of the receive that it took */
	uint32_t len;
	uint32_t immediate; /* if flags say so */
	uint32_t flags; /* any of KR_IMMEDIATE and KR_WRITTEN */
};

/*
 * Makes a queue that is connected to nothing. Returns its number, at least 1. Queues, and memory of
 * kr_reg_mr, are the process's that made them: a child that it forks ends none of them.
 */
int kr_queue(void);

/*
 * Connects it to a node, which hears nothing of it, and to whoever listens at a port there unless
 * that is 0. Returns 0.
 */
int kr_connect(int qd, uint32_t node, uint32_t port);

/* Binds it to a port of this node, where others connect to. Returns 0. */
int kr_bind(int qd, uint32_t port);

/* Takes a queue that somebody has connected to the port of this one. Returns its number. */
int kr_accept(int qd, int timeout_ms);

/*
 * Ends a queue, once calls that use it have returned. What the RNIC has begun ends first, what
 * waits for its turn is dropped, and the other end sees -ECONNRESET. Returns 0.
 */
int kr_close(int qd);

/*
 * Registers memory for the queues of this process, and of others who are told address and key.
 * others is any of KR_MR_…. It is pinned, and counts against RLIMIT_MEMLOCK. Returns 0.
 */
int kr_reg_mr(void *addr, uint64_t size, uint32_t others, uint32_t *key);

/* Takes it back, once no request of this process names it any more. Returns 0. */
int kr_dereg_mr(uint32_t key);

/* Adds requests, all or none, which are done in their order. Returns 0. */
int kr_push(int qd, const struct kr_request *list, int count);

/*
 * A descriptor for poll(2). It is readable while any queue of this process has completions or
 * messages, or somebody waits to be accepted; it does not tell which: try each with a timeout of 0,
 * and go on after -EAGAIN. It is kite's: not to be read, written or closed.
 */
int kr_fd(void);

/* Takes up to count completions, in the order of their requests. Returns how many. */
int kr_pop(int qd, struct kr_completion *list, int count, int timeout_ms);

/*
 * Submits a request to a queue pair of LT_queue (kite/lite.h), which hands it on: under steady load
 * few take a system call. LT_wait and LT_poll return its completion, whether it is KR_SIGNALED or
 * not, and one that is refused stops no others. Those that are submitted to one queue pair for the
 * same queue are done in their order; while KR_DEPTH are under way the next waits. Returns 0, or
 * -ENOBUFS while as many are unfinished as the queue pair has entries.
 */
int kr_push_async(int qd, int64_t lt_queue, const struct kr_request *request);

/* Adds places for messages, all or none, which take them in this order. Returns 0. */
int kr_push_recv(int qd, const struct kr_receive *list, int count);

/*
 * Takes up to count messages, to places of kr_push_recv. Returns how many, or -EINVAL if there is
 * no place, or -EMSGSIZE if the first place is too small for the first message: both stay.
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
