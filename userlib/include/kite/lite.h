/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The C library of kite: memory of other nodes by name, under the names that LITE gave its calls.
 *
 * A process joins once, then allocates regions (LITE: LMRs) or opens those of others by name, and
 * reads and writes them in place. A handle (LITE: lh) is valid in this process only. Handles that
 * are open when the process ends are closed, and regions without a name go with their last handle.
 *
 * Every call returns a value of at least 0, or a negative errno:
 *
 *  -EACCES           the user has not the right, or the handle was opened without it; in LT_join:
 *                    the user may not open /dev/kite
 *  -EAGAIN           LT_lock with LT_TRY: others have the lock, or wait for it; LT_wait and
 *                    LT_poll: there is nothing to wait for, or to take
 *  -EBADF            no such handle or queue pair, or no such call to answer or lock to unlock
 *  -EBUSY            LT_join: joined already; LT_regRPC: served by this handle already; LT_queue:
 *                    there are as many queue pairs as may be
 *  -ECANCELED        LT_cancel gave the request up
 *  -ECONNREFUSED     nobody serves the region
 *  -ECONNRESET       the server ended before it replied
 *  -EEXIST           the name is taken
 *  -EFAULT           a buffer is no memory, or may not be written
 *  -EHOSTDOWN        a node that holds the region is not in the cluster
 *  -EHOSTUNREACH     this node is in no cluster: start kited
 *  -EINVAL           an argument is not allowed
 *  -EIO              the RNIC or the peer refused the operation
 *  -EINTR            LT_recvRPC, LT_lock, LT_barrier, LT_wait, LT_wait_timeout: a signal came
 *  -EMSGSIZE         longer than any message, or than the buffer that it is for
 *  -ENAMETOOLONG     a name of more than LT_NAME_MAX bytes
 *  -ENOBUFS          LT_async_*: the queue is full
 *  -ENODEV           no such RNIC, or none at all
 *  -ENOENT           no region of that name; in LT_join: the module is not loaded
 *  -ENOMEM           no memory here or at the node asked
 *  -ENOTCONN         LT_join comes first
 *  -EOPNOTSUPP       LT_recvRPC: not served by this handle
 *  -EPROTONOSUPPORT  the module is of another version
 *  -ERANGE           outside the region
 *  -EREMOTE          LT_regRPC: the region belongs to another node
 *  -ESTALE           the region was freed
 *  -ETIMEDOUT        the deadline passed
 *
 * All calls may be made by several threads at once. They block until they are done, or until their
 * deadline: for LT_read, LT_write, atomic operations and LT_RPC the module's, or 10 s if a signal
 * came to a read or write. Signals end none but LT_recvRPC and LT_wait, which have no deadline,
 * LT_wait_timeout, LT_lock and LT_barrier.
 */
#ifndef KITE_LITE_H
#define KITE_LITE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rights to a region. */
#define LT_READ 1u /* read its memory */
#define LT_WRITE 2u /* write its memory, and call its servers */
#define LT_MASTER 4u /* serve it, free it, move it, and grant rights to it */

/* Most bytes of a name, without its terminating zero. */
#define LT_NAME_MAX 63

/* Most nodes that a region is striped over. */
#define LT_STRIPE_MAX 64

/* A handle to a region, positive. */
typedef int64_t LT_lh;

/*
 * Joins this process to the cluster of the RNIC of this name; NULL is the first with an active
 * port, or else the first. Returns the number of this node, at least 1.
 * A child that the process forks ends nothing of what it has: who goes to the background by fork
 * does that first.
 */
int LT_join(const char *rnic);

/* Priorities. */
#define LT_PRIORITY_HIGH 0u
#define LT_PRIORITY_LOW 1u

/*
 * Sets the priority of this process's requests, from now on; at first it is high. Those of low
 * priority give way to others on the same RNIC. They never starve, but may take long.
 */
int LT_set_priority(uint32_t priority);

/*
 * Allocates a region of size bytes, at least 1, zeroed, and opens it with all rights. Returns a
 * handle.
 *
 * Its memory is striped over node_count nodes, chunk by chunk, in this order; 0 means this node,
 * and nodes is not used. With a name, which is unique in the cluster, it lives until it is freed;
 * NULL or "" is none. Users other than the owner and root get the rights others.
 */
LT_lh LT_malloc(const uint32_t *nodes, uint32_t node_count, uint64_t size, const char *name,
		uint32_t others);

/*
 * Makes a region of size bytes of memory of this process, which begins at a page, and opens it with
 * all rights; name and others are as of LT_malloc. The process goes on using the memory while
 * others read and write the region. It is pinned for as long as the region lives, also when the
 * process unmaps it or ends, and counts against RLIMIT_MEMLOCK. Returns a handle.
 */
LT_lh LT_register(void *memory, uint64_t size, const char *name, uint32_t others);

/*
 * Frees a region for everybody, and closes the handle, which needs LT_MASTER. Returns 0 when nobody
 * can reach the memory any more. After an error the handle is closed all the same.
 */
int LT_free(LT_lh lh);

/* Opens the region of this name with exactly these rights, at least one. Returns a handle. */
LT_lh LT_map(const char *name, uint32_t rights);

/* Closes a handle, when calls that use it have returned. Returns 0. */
int LT_unmap(LT_lh lh);

/*
 * Gives a user these rights to the region instead of those of others; LT_grant_others gives them
 * to all that were not named so. Needs LT_MASTER. Root and the owner have all rights: -EINVAL.
 * Handles of users who have lost a right that these were opened with fail with -EACCES from then
 * on, and nothing is done by them any more when this returns 0, but for calls that wait for room in
 * the ring of their server. After any error but -EACCES and -EINVAL it may have been done, or may
 * yet be.
 */
int LT_grant(LT_lh lh, uint32_t uid, uint32_t rights);
int LT_grant_others(LT_lh lh, uint32_t rights);

/*
 * Moves the region to other nodes, chunk by chunk, as LT_malloc places it, in timeout_ms
 * milliseconds at most, or 0 for the module's default. Needs LT_MASTER. Everybody may go on using
 * it: handles stay as they are, and nothing that was written is lost. The node that allocated it
 * goes on to be its owner. -EBUSY if it is moving already; after other errors but -EACCES and
 * -EINVAL a part of it may have moved.
 */
int LT_move(LT_lh lh, const uint32_t *nodes, uint32_t node_count, uint32_t timeout_ms);

/* Reads size bytes of the region, from offset, to buffer. Returns 0 when all are there. */
int LT_read(LT_lh lh, uint64_t offset, void *buffer, uint64_t size);

/*
 * Writes size bytes from buffer to the region, at offset. Returns 0 when any later read, by any
 * node, sees all of them. Nothing larger than a byte is atomic.
 */
int LT_write(LT_lh lh, uint64_t offset, const void *buffer, uint64_t size);

/* Bytes of a region, and of memory. */
struct LT_segment {
	uint64_t offset; /* first byte in the region */
	void *data;
	uint64_t size;
};

/*
 * As LT_read and LT_write, for count segments, of which several are under way at once, in no
 * particular order. Up to 1024 are one request, with a deadline of its own, of which nothing is
 * done if one of them is not all in the region. What is read must not go to the same bytes twice.
 */
int LT_readv(LT_lh lh, const struct LT_segment *segments, uint32_t count);
int LT_writev(LT_lh lh, const struct LT_segment *segments, uint32_t count);

/*
 * Makes size bytes of the region, from offset, byte (converted to unsigned char). It is done where
 * they are. Needs LT_WRITE. Returns 0 when any later read, by any node, sees it. After an error an
 * unknown part was done, and of it up to 256 KiB may yet be.
 */
int LT_memset(LT_lh lh, uint64_t offset, int byte, uint64_t size);

/*
 * Copies size bytes between regions, or within one; they may overlap. Done by the node that has the
 * memory where one node has both, else by way of this one. Needs LT_WRITE for to and LT_READ for
 * from. Returns as LT_memset. LT_memcpy does the same.
 */
int LT_memmove(LT_lh to, uint64_t to_offset, LT_lh from, uint64_t from_offset, uint64_t size);
int LT_memcpy(LT_lh to, uint64_t to_offset, LT_lh from, uint64_t from_offset, uint64_t size);

/*
 * Atomic operations on the number of eight bytes at offset, a multiple of 8, in the byte order of
 * the machine. Those of all nodes on the same number take effect one after the other, each once.
 * They need LT_READ and LT_WRITE. After -EHOSTDOWN, -EHOSTUNREACH, -EIO, -ESTALE and -ETIMEDOUT
 * one may have been done, or may yet be.
 *
 * Until LT_write returns it may write its bytes more than once. So what atomic operations keep,
 * such as a lock, is to be freed by LT_swap, not by LT_write.
 *
 * All but LT_test_set return 0, and set *value, unless value is NULL, to what the number was.
 */

/* Adds operand, modulo 2^64. */
int LT_fetch_add(LT_lh lh, uint64_t offset, uint64_t operand, uint64_t *value);

/* Replaces the number by new_number if it is as expected: then *value is expected. */
int LT_compare_swap(LT_lh lh, uint64_t offset, uint64_t expected, uint64_t new_number,
		    uint64_t *value);

/* Replaces the number by new_number. */
int LT_swap(LT_lh lh, uint64_t offset, uint64_t new_number, uint64_t *value);

/* Makes the number 1 if it is 0. Returns 1 if it was 0, and 0 if not. */
int LT_test_set(LT_lh lh, uint64_t offset);

/*
 * Most bytes of data of a call, a message or a reply that travel in one piece. More go by memory
 * that the caller's node sets aside while the call lasts, and then keeps for the next.
 */
#define LT_DATA_INLINE 8128

/* Most bytes of data of a call, a message or a reply. */
#define LT_DATA_MAX 0x40000000u

/*
 * Serves the region, which this node allocated: who has it open with LT_WRITE can call. Each node
 * that calls gets a ring of ring_size bytes for its calls, a power of two from 32 KiB to 4 MiB, or
 * 0 for 64 KiB. Calls and messages have at most data_max bytes of data, LT_DATA_INLINE to
 * LT_DATA_MAX, or 0 for the former; who calls with more gets -EMSGSIZE. Needs LT_MASTER. Any number
 * of threads and processes may serve one region, on the terms of the first; each call goes to one
 * of them. It is served until the handle is closed. Returns 0.
 */
int LT_regRPC(LT_lh lh, uint32_t ring_size, uint32_t data_max);

/* A call or message that was received. */
struct LT_call {
	uint64_t id; /* to reply to, or 0 for a message */
	uint32_t function; /* as the caller said */
	uint32_t node; /* of the caller */
	uint32_t uid; /* effective user of the caller */
};

/*
 * Calls function of who serves the region, with size bytes of data, and waits for the reply, of
 * which room bytes have room. If that is more than LT_DATA_INLINE this node sets as much memory
 * aside. A call is made once at most. After -ECONNRESET, -EHOSTDOWN, -EIO and -ETIMEDOUT it may
 * have been made, or may yet be. Returns the bytes of the reply.
 */
int64_t LT_RPC(LT_lh lh, uint32_t function, const void *data, uint64_t size, void *reply,
	       uint64_t room);

/* What came of one call of LT_multicast_RPC. */
struct LT_reply {
	void *data; /* where it goes */
	uint64_t room; /* bytes there */
	int64_t result; /* set: its bytes, or a negative errno */
};

/*
 * As LT_RPC, to the servers of count regions, all at once. Sets the result of each. Up to 1024
 * calls are under way at a time, fewer if data and the largest rooms have more than 1 MiB
 * together, and 16 if one of them has. Returns 0, or a negative errno, after which some servers
 * may have been called: -EBUSY and -ENOMEM as LT_queue, since short replies come by such a queue.
 */
int LT_multicast_RPC(const LT_lh *lhs, uint32_t count, uint32_t function, const void *data,
		     uint64_t size, struct LT_reply *replies);

/*
 * Sends a message to who serves the region. Those of one thread come in order. Returns 0 when it is
 * at the server's node, or, with more than LT_DATA_INLINE bytes, when a server has it.
 */
int LT_send(LT_lh lh, uint32_t function, const void *data, uint64_t size);

/*
 * Waits for a call or message to a region that LT_regRPC serves. Returns the bytes of its data,
 * which are in buffer. After -EMSGSIZE it waits for a server with more room; no call needs more
 * than the data_max of LT_regRPC.
 */
int64_t LT_recvRPC(LT_lh lh, struct LT_call *call, void *buffer, uint64_t room);

/*
 * Answers a call, by its id, with size bytes of data. The call has ended hereby, also after an
 * error. That the caller waits no more, or is gone, is none. Returns 0.
 */
int LT_replyRPC(uint64_t id, const void *data, uint64_t size);

/*
 * LT_replyRPC to call->id, unless that is 0, and LT_recvRPC, in one request. *call is set on
 * success only; also after an error the call that was to be answered has ended.
 */
int64_t LT_reply_recvRPC(LT_lh lh, struct LT_call *call, const void *data, uint64_t size,
			 void *buffer, uint64_t room);

/* How to take a lock. */
#define LT_SHARED 1u /* with others that share it; needs LT_READ instead of LT_WRITE */
#define LT_TRY 2u /* waits for nobody */

/*
 * Takes lock number of the region, which has one for each number; needs LT_WRITE. All who want it
 * stand in line for it, in order, for timeout_ms milliseconds at most, or 0 for the module's
 * default. Who has it sees what was written by those who had it before. Sets *id, by which it is
 * unlocked. It ends with the handle, too, as if its holder had died.
 *
 * Returns 0, or 1 if one that had the lock ended without unlocking it, and what it guards may be
 * half done. All who take it are told so, until one that has it alone unlocks it.
 */
int LT_lock(LT_lh lh, uint64_t number, uint32_t flags, uint32_t timeout_ms, uint64_t *id);

/* Gives a lock back. Returns 0, or -EACCES, -EHOSTDOWN or -ESTALE if it had ended before. */
int LT_unlock(uint64_t id);

/*
 * Waits until count have come to barrier number of the region, which has one for each number,
 * besides its locks; for timeout_ms milliseconds at most, or 0 for the module's default. Needs
 * LT_WRITE. Returns how often the barrier was passed, this time included. After -EINTR, -EIO and
 * -ETIMEDOUT the others may have passed all the same, as the next result shows.
 */
int64_t LT_barrier(LT_lh lh, uint64_t number, uint32_t count, uint32_t timeout_ms);

/*
 * Queue pairs: requests that are done while the program goes on, and under steady load without
 * system calls. A request is submitted with a tag, and has completed when LT_wait or LT_poll says
 * so, in any order. What it reads or writes is memory of the queue pair. A queue pair is for one
 * thread at a time; others that use it wait for that.
 */

/*
 * Makes a queue pair of entries requests at a time, a power of two up to 1024, with size bytes of
 * memory, at most 1 GiB, which is pinned and counts against RLIMIT_MEMLOCK; *memory points to it.
 * A process has 16 of them at most. Returns its number.
 */
int64_t LT_queue(uint32_t entries, uint64_t size, void **memory);

/* Ends a queue pair, whose memory is there no more. Returns 0. */
int LT_unqueue(int64_t queue);

/*
 * As the functions without async, but they only submit, for LT_submit or LT_wait to have the
 * kernel begin. Return 0, or -ENOBUFS while as many are unfinished as the queue has entries, or
 * -ERANGE for what is not all in the memory of the queue pair.
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
 * LT_recvRPC by a queue pair: size bytes at to have room for what tells of it, LT_HEAD bytes, and
 * for the data behind that. When it has completed, with the bytes of data as its value, LT_received
 * sets *call, once, and returns these. Answers are by either LT_async_replyRPC or LT_replyRPC.
 */
#define LT_HEAD 32
int LT_async_recvRPC(int64_t queue, uint64_t tag, LT_lh lh, void *to, uint64_t size);
int64_t LT_received(int64_t queue, LT_lh lh, const void *to, struct LT_call *call);
int LT_async_replyRPC(int64_t queue, uint64_t tag, uint64_t id, const void *data, uint64_t size);

/* What came of a request. */
struct LT_completion {
	uint64_t tag; /* as it was submitted */
	uint64_t value; /* what the number was, or the bytes of the reply, or of the call; else 0 */
	int status; /* 0, or a negative errno */
};

/* Has the kernel begin with what was submitted. Returns 0. */
int LT_submit(int64_t queue);

/*
 * LT_submit, and waits for a completion without limit: polls first, then sleeps. Other threads
 * may submit and cancel meanwhile. Returns 0, or -EAGAIN if nothing is unfinished, or -EINTR if a
 * signal handler ran or the process was stopped and continued.
 */
int LT_wait(int64_t queue, struct LT_completion *completion);

/*
 * LT_wait for at most timeout_ms milliseconds, then -ETIMEDOUT. A negative timeout_ms is without
 * limit.
 */
int LT_wait_timeout(int64_t queue, struct LT_completion *completion, int timeout_ms);

/* Takes a completion, or returns -EAGAIN if there is none now. */
int LT_poll(int64_t queue, struct LT_completion *completion);

/*
 * Gives up a request of that tag that was not begun, or that waits for a reply: it completes with
 * -ECANCELED. A call may have been made, or may yet be. Returns 1, or 0 if there is none.
 */
int LT_cancel(int64_t queue, uint64_t tag);

#ifdef __cplusplus
}
#endif

#endif /* KITE_LITE_H */
