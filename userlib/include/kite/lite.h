/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * C library of kite, with the function names of LITE: remote memory by name, RPC, locks, I/O
 * queues.
 *
 * A process joins once (LT_join). It then allocates regions (LITE: LMRs), opens regions of others
 * by name, and accesses them in place. A handle (LITE: lh) is valid in its process only. The end
 * of the process closes its handles. A region without a name is freed with its last handle.
 *
 * Functions return a value of at least 0, or a negative errno:
 *
 *  -EACCES           the user or the handle lacks the right; LT_join: the user may not open
 *                    /dev/kite
 *  -EAGAIN           LT_lock with LT_TRY: the lock has an owner or waiters; LT_wait, LT_poll: no
 *                    request is in flight, or no completion is available
 *  -EBADF            no such handle, queue, call or lock
 *  -EBUSY            LT_join: joined already; LT_regRPC: the handle serves already; LT_queue: the
 *                    process has the maximum of queues
 *  -ECANCELED        canceled by LT_cancel
 *  -ECONNREFUSED     the region has no server
 *  -ECONNRESET       the server ended before it replied
 *  -EEXIST           the name is taken
 *  -EFAULT           a buffer is not mapped, or not writable
 *  -EHOSTDOWN        a required node is not in the cluster, or unreachable
 *  -EHOSTUNREACH     this node is in no cluster: start kited
 *  -EINVAL           invalid argument
 *  -EIO              the RNIC or the peer rejected the operation
 *  -EINTR            LT_recvRPC, LT_lock, LT_barrier, LT_wait, LT_wait_timeout: a signal
 *                    handler ran
 *  -EMSGSIZE         longer than the maximum of a message, or than its buffer
 *  -ENAMETOOLONG     a name of more than LT_NAME_MAX bytes
 *  -ENOBUFS          LT_async_*: the queue is full
 *  -ENODEV           no such RNIC, or the RNIC was removed
 *  -ENOENT           no region has the name; LT_join: the module is not loaded
 *  -ENOMEM           no memory on this node or another, or a limit on memory is reached
 *  -ENOTCONN         the process has not called LT_join
 *  -EOPNOTSUPP       LT_recvRPC: the handle does not serve the region; LT_rename: the home has an
 *                    older module without renames
 *  -EPROTONOSUPPORT  the module has another version of the ABI
 *  -ERANGE           outside the region
 *  -EREMOTE          LT_regRPC: the home of the region is another node
 *  -ESTALE           the region was freed
 *  -ETIMEDOUT        the deadline passed
 *
 * All functions are thread-safe. They block until the operation completes or its deadline passes.
 * The deadline of LT_read, LT_write, atomic operations and LT_RPC is the module parameter
 * default_timeout_ms. A read or write that a signal interrupts has the remainder of 10 s.
 * LT_recvRPC and LT_wait have no deadline. Signals interrupt LT_recvRPC, LT_wait,
 * LT_wait_timeout, LT_lock and LT_barrier only.
 */
#ifndef KITE_LITE_H
#define KITE_LITE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rights to a region. */
#define LT_READ 1u /* read the memory */
#define LT_WRITE 2u /* write the memory, call the servers, take exclusive locks */
#define LT_MASTER 4u /* serve, free and move the region, and grant rights */

/* Maximum bytes of a name, without its terminating zero. */
#define LT_NAME_MAX 63

/* Maximum nodes that a region is striped over. */
#define LT_STRIPE_MAX 64

/* Handle of a region, positive. */
typedef int64_t LT_lh;

/*
 * Opens the session of this process on the RNIC of this name. NULL selects the first RNIC with an
 * active port, or the first RNIC if no port is active. Returns the number of this node, at least
 * 1. A forked child cannot end objects of its parent. A daemon that forks must call LT_join
 * afterwards.
 */
int LT_join(const char *rnic);

/* Priorities. */
#define LT_PRIORITY_HIGH 0u
#define LT_PRIORITY_LOW 1u

/*
 * Sets the priority of later requests of this process. The initial priority is high. Requests of
 * low priority yield to those of high priority on the same RNIC, and always get a minimum rate.
 */
int LT_set_priority(uint32_t priority);

/*
 * Allocates a region of size zeroed bytes, at least 1, and opens it with all rights. Returns a
 * handle.
 *
 * The memory is striped over node_count nodes, chunk by chunk, in this order. A node_count of 0
 * selects this node, and nodes is ignored. A region with a name, which is unique in the cluster,
 * exists until it is freed. NULL and "" are no name. Users other than the owner and root get the
 * rights others.
 */
LT_lh LT_malloc(const uint32_t *nodes, uint32_t node_count, uint64_t size, const char *name,
		uint32_t others);

/*
 * Creates a region of size bytes of memory of this process, which begins at a page, and opens it
 * with all rights. For name and others see LT_malloc. The process may use the memory while others
 * access the region. The memory is pinned while the region exists, also after the process has
 * unmapped it or has ended, and counts against RLIMIT_MEMLOCK. Returns a handle.
 */
LT_lh LT_register(void *memory, uint64_t size, const char *name, uint32_t others);

/*
 * Frees a region for all users, and closes the handle. Needs LT_MASTER. Returns 0 when no node
 * can reach the memory. The handle is closed also after an error.
 */
int LT_free(LT_lh lh);

/* Opens the region of this name with exactly these rights, at least one. Returns a handle. */
LT_lh LT_map(const char *name, uint32_t rights);

/* Closes a handle after functions that use it have returned. Returns 0. */
int LT_unmap(LT_lh lh);

/*
 * Grants these rights to a user, in place of the rights of others. LT_grant_others grants them to
 * all users without a grant of their own. Needs LT_MASTER. Root and the owner always have all
 * rights: -EINVAL. A handle that was opened with a right that its user loses fails with -EACCES.
 * When the function returns 0, such handles have no operation in flight, except calls that wait
 * for space in the ring of their server. After any error but -EACCES and -EINVAL the grant may
 * have been made, or may be made later.
 */
int LT_grant(LT_lh lh, uint32_t uid, uint32_t rights);
int LT_grant_others(LT_lh lh, uint32_t rights);

/*
 * Migrates the region to other nodes, placed as by LT_malloc, in at most timeout_ms milliseconds;
 * 0 is the default of the module. Needs LT_MASTER. All users may access the region meanwhile:
 * handles stay valid, and no write is lost. The home of the region does not change. -EBUSY if
 * another migration of the region, or a rename, is in progress. After other errors but -EACCES and
 * -EINVAL some chunks may have been migrated.
 */
int LT_move(LT_lh lh, const uint32_t *nodes, uint32_t node_count, uint32_t timeout_ms);

/*
 * Gives a named region another name. Needs LT_MASTER. Handles stay valid, and the old name is free
 * when the function returns 0. -EEXIST if a region has the name, -EBUSY if a migration or another
 * rename of the region is in progress, and -EINVAL if the region is anonymous. The region has one
 * of the names at any time; the old one after -EACCES, -EBUSY, -EEXIST, -EINVAL, -ENAMETOOLONG and
 * -EOPNOTSUPP.
 */
int LT_rename(LT_lh lh, const char *name);

/* Reads size bytes at offset of the region to buffer. Returns 0. */
int LT_read(LT_lh lh, uint64_t offset, void *buffer, uint64_t size);

/*
 * Writes size bytes from buffer to offset of the region. Returns 0 when each later read by any
 * node returns them. Only single bytes are atomic.
 */
int LT_write(LT_lh lh, uint64_t offset, const void *buffer, uint64_t size);

/* Range of a region, with its data. */
struct LT_segment {
	uint64_t offset; /* first byte in the region */
	void *data;
	uint64_t size;
};

/*
 * Reads or writes count segments concurrently, in no particular order. Up to 1024 segments are
 * one request of the kernel. Each request has its own deadline, and fails before any byte moves
 * if a segment reaches outside the region. The destinations of a read must not overlap.
 */
int LT_readv(LT_lh lh, const struct LT_segment *segments, uint32_t count);
int LT_writev(LT_lh lh, const struct LT_segment *segments, uint32_t count);

/*
 * Fills size bytes at offset of the region with byte (converted to unsigned char). The nodes that
 * hold the range fill it. Needs LT_WRITE. Returns 0 when each later read by any node returns the
 * bytes. After an error an unspecified part is filled, and up to 256 KiB may be filled later.
 */
int LT_memset(LT_lh lh, uint64_t offset, int byte, uint64_t size);

/*
 * Copies size bytes between regions, or within one. The ranges may overlap. A node that holds
 * both ranges copies them. Otherwise this node reads and writes them. Needs LT_WRITE for to and
 * LT_READ for from. For the result see LT_memset. LT_memcpy is the same function.
 */
int LT_memmove(LT_lh to, uint64_t to_offset, LT_lh from, uint64_t from_offset, uint64_t size);
int LT_memcpy(LT_lh to, uint64_t to_offset, LT_lh from, uint64_t from_offset, uint64_t size);

/*
 * Atomic operations on the 8-byte word at offset, a multiple of 8, in native byte order.
 * Operations of all nodes on one word take effect one after the other, each at most once, and
 * exactly once on success. They need LT_READ and LT_WRITE. After -EHOSTDOWN, -EHOSTUNREACH, -EIO,
 * -ENODEV, -ESTALE and -ETIMEDOUT the operation may have been executed, or may be executed later.
 *
 * LT_write may write its bytes more than once until it returns. Release a word that atomic
 * operations protect, such as a spin lock, by LT_swap, not by LT_write.
 *
 * All but LT_test_set return 0, and set *value to the previous value, unless value is NULL.
 */

/* Adds operand, modulo 2^64. */
int LT_fetch_add(LT_lh lh, uint64_t offset, uint64_t operand, uint64_t *value);

/* Replaces the word by new_number if it is expected. Then *value is expected. */
int LT_compare_swap(LT_lh lh, uint64_t offset, uint64_t expected, uint64_t new_number,
		    uint64_t *value);

/* Replaces the word by new_number. */
int LT_swap(LT_lh lh, uint64_t offset, uint64_t new_number, uint64_t *value);

/* Replaces the word by 1 if it is 0. Returns 1 if it was 0, else 0. */
int LT_test_set(LT_lh lh, uint64_t offset);

/*
 * Maximum bytes of a call, message or reply that are sent inline. For more data the node of the
 * caller allocates a buffer. It keeps up to 4 buffers of at most 256 KiB per process for later
 * calls.
 */
#define LT_DATA_INLINE 8128

/* Maximum bytes of data of a call, a message or a reply. */
#define LT_DATA_MAX 0x40000000u

/*
 * Makes this process a server of the region, whose home must be this node. Handles with LT_WRITE
 * can call. Each client node gets a ring of ring_size bytes, a power of two, 32 KiB ... 4 MiB; 0
 * is 64 KiB. Calls and messages have at most data_max bytes of data, LT_DATA_INLINE ...
 * LT_DATA_MAX; 0 is LT_DATA_INLINE. A call with more data fails with -EMSGSIZE. Needs LT_MASTER.
 * Up to 1024 handles may serve a region, with the parameters of the first, and any number of
 * threads by each. Each call is received once. The server ends with the handle. Returns 0.
 */
int LT_regRPC(LT_lh lh, uint32_t ring_size, uint32_t data_max);

/* A received call or message. */
struct LT_call {
	uint64_t id; /* for LT_replyRPC, or 0 for a message */
	uint32_t function; /* function number, chosen by the caller */
	uint32_t node; /* node of the caller */
	uint32_t uid; /* effective user of the caller */
};

/*
 * Calls a server of the region with size bytes of data for function, and waits for the reply, of
 * at most room bytes. If room exceeds LT_DATA_INLINE this node allocates a buffer of that size. A
 * call is executed at most once. After -ECONNRESET, -EHOSTDOWN, -EIO, -ENODEV and -ETIMEDOUT it
 * may have been executed, or may be executed later. Returns the bytes of the reply.
 */
int64_t LT_RPC(LT_lh lh, uint32_t function, const void *data, uint64_t size, void *reply,
	       uint64_t room);

/* Reply of one call of LT_multicast_RPC. */
struct LT_reply {
	void *data; /* in: buffer */
	uint64_t room; /* in: bytes of the buffer */
	int64_t result; /* out: bytes of the reply, or a negative errno */
};

/*
 * Calls the servers of count regions concurrently. Sets the result of each reply. See LT_RPC. Up
 * to 1024 calls are in flight: fewer if data and the replies exceed 1 MiB together, and 16 if
 * data and one reply do. Returns 0, or a negative errno, after which some servers may have been
 * called. The errors include -EBUSY and -ENOMEM of LT_queue, since short replies use an I/O
 * queue.
 */
int LT_multicast_RPC(const LT_lh *lhs, uint32_t count, uint32_t function, const void *data,
		     uint64_t size, struct LT_reply *replies);

/*
 * Sends a message to a server of the region. Messages of one thread arrive in order. Returns 0
 * when the message is at the node of the server, or, with more than LT_DATA_INLINE bytes, when a
 * server has received it.
 */
int LT_send(LT_lh lh, uint32_t function, const void *data, uint64_t size);

/*
 * Waits for a call or message to a region that this handle serves. Stores the data in buffer, of
 * room bytes, and returns their number. After -EMSGSIZE the call remains pending for a receive
 * with a larger buffer. data_max bytes of LT_regRPC always suffice.
 */
int64_t LT_recvRPC(LT_lh lh, struct LT_call *call, void *buffer, uint64_t room);

/*
 * Replies to the call id with size bytes of data. The call ends also after an error. It is no
 * error if the caller no longer waits. Returns 0.
 */
int LT_replyRPC(uint64_t id, const void *data, uint64_t size);

/*
 * LT_replyRPC to call->id, unless it is 0, and LT_recvRPC, in one system call. Sets *call on
 * success only. The call that was replied to ends also after an error.
 */
int64_t LT_reply_recvRPC(LT_lh lh, struct LT_call *call, const void *data, uint64_t size,
			 void *buffer, uint64_t room);

/* Flags of LT_lock. */
#define LT_SHARED 1u /* shared mode; needs LT_READ instead of LT_WRITE */
#define LT_TRY 2u /* does not wait */

/*
 * Acquires lock number of the region. A region has a lock for each number. Needs LT_WRITE.
 * Waiters are served in FIFO order, and wait for at most timeout_ms milliseconds; 0 is the
 * default of the module. The owner sees all writes of earlier owners. Sets *id for LT_unlock. If
 * the handle is closed, the lock ends as if its owner had died.
 *
 * Returns 0, or 1 if an owner ended without unlocking, so that the protected data may be
 * inconsistent. All later owners get 1 until an exclusive owner unlocks.
 */
int LT_lock(LT_lh lh, uint64_t number, uint32_t flags, uint32_t timeout_ms, uint64_t *id);

/* Releases a lock. Returns 0, or -EACCES, -EHOSTDOWN or -ESTALE if the lock had ended before. */
int LT_unlock(uint64_t id);

/*
 * Waits until count participants have arrived at barrier number of the region, for at most
 * timeout_ms milliseconds; 0 is the default of the module. A region has a barrier for each
 * number, independent of its locks. Needs LT_WRITE. Returns the number of completed rounds, this
 * one included. After -EINTR, -EIO and -ETIMEDOUT the round may nevertheless have completed; the
 * next result has counted it.
 */
int64_t LT_barrier(LT_lh lh, uint64_t number, uint32_t count, uint32_t timeout_ms);

/*
 * I/O queues: asynchronous requests, without system calls under steady load. Each request has a
 * tag, which its completion returns. Requests may complete in any order. Their data are in the
 * buffer of the queue. One thread at a time uses a queue; other threads block.
 */

/*
 * Creates an I/O queue for entries requests in flight, a power of two up to 1024, with a buffer
 * of size bytes, at most 1 GiB. The buffer is pinned, and counts against RLIMIT_MEMLOCK. Sets
 * *memory to the buffer. A process has at most 16 queues. Returns the number of the queue.
 */
int64_t LT_queue(uint32_t entries, uint64_t size, void **memory);

/* Destroys a queue and unmaps its buffer. Returns 0. */
int LT_unqueue(int64_t queue);

/*
 * Asynchronous variants of the functions without async. LT_submit or LT_wait starts the requests.
 * They return 0, -ENOBUFS if the queue is full, or -ERANGE if data are outside the buffer of the
 * queue.
 */
int LT_async_read(int64_t queue, uint64_t tag, LT_lh lh, uint64_t offset, void *to, uint64_t size);
int LT_async_write(int64_t queue, uint64_t tag, LT_lh lh, uint64_t offset, const void *from,
		   uint64_t size);
int LT_async_memset(int64_t queue, uint64_t tag, LT_lh lh, uint64_t offset, int byte,
		    uint64_t size);
int LT_async_memmove(int64_t queue, uint64_t tag, LT_lh to, uint64_t to_offset, LT_lh from,
		     uint64_t from_offset, uint64_t size);
int LT_async_fetch_add(int64_t queue, uint64_t tag, LT_lh lh, uint64_t offset, uint64_t operand);
int LT_async_compare_swap(int64_t queue, uint64_t tag, LT_lh lh, uint64_t offset,
			  uint64_t expected, uint64_t new_number);
int LT_async_swap(int64_t queue, uint64_t tag, LT_lh lh, uint64_t offset, uint64_t new_number);
int LT_async_RPC(int64_t queue, uint64_t tag, LT_lh lh, uint32_t function, const void *data,
		 uint64_t size, void *reply, uint64_t room);
int LT_async_send(int64_t queue, uint64_t tag, LT_lh lh, uint32_t function, const void *data,
		  uint64_t size);

/*
 * LT_recvRPC by an I/O queue. The size bytes at to receive a header of LT_HEAD bytes and the
 * data. The value of the completion is the bytes of data. LT_received then sets *call, once, and
 * returns the bytes of data. LT_async_replyRPC and LT_replyRPC reply.
 */
#define LT_HEAD 32
int LT_async_recvRPC(int64_t queue, uint64_t tag, LT_lh lh, void *to, uint64_t size);
int64_t LT_received(int64_t queue, LT_lh lh, const void *to, struct LT_call *call);
int LT_async_replyRPC(int64_t queue, uint64_t tag, uint64_t id, const void *data, uint64_t size);

/* Completion of a request. */
struct LT_completion {
	uint64_t tag; /* tag of the request */
	uint64_t value; /* previous value, or bytes of the reply or of the call; else 0 */
	int status; /* 0, or a negative errno */
};

/* Publishes all new requests to the kernel. Returns 0. */
int LT_submit(int64_t queue);

/*
 * LT_submit, and waits for a completion without limit. Other threads may submit and cancel
 * meanwhile. Returns 0, -EAGAIN if no request is in flight, or -EINTR if a signal handler ran or
 * the process was stopped and continued.
 */
int LT_wait(int64_t queue, struct LT_completion *completion);

/* LT_wait for at most timeout_ms milliseconds, then -ETIMEDOUT. Negative: without limit. */
int LT_wait_timeout(int64_t queue, struct LT_completion *completion, int timeout_ms);

/* Returns a completion, or -EAGAIN if there is none. Does not wait. */
int LT_poll(int64_t queue, struct LT_completion *completion);

/*
 * Cancels a request with this tag that has not started, or that waits for a reply. It completes
 * with -ECANCELED. A canceled call may have been executed, or may be executed later. Returns 1,
 * or 0 if there is no such request.
 */
int LT_cancel(int64_t queue, uint64_t tag);

#ifdef __cplusplus
}
#endif

#endif /* KITE_LITE_H */
