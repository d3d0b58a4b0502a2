/* SPDX-License-Identifier: GPL-2.0 */
/*
 * kite for other kernel modules: remote memory regions by name, calls to who serves them, and their
 * locks and barriers.
 *
 * The same as the device gives to processes (see uapi/kite.h for handles, rights, limits and what
 * each errno means). A session belongs to its module, which acts as root and must close it before
 * it is unloaded. Whatever has no deadline of its own has that of the module's parameter
 * timeout_ms. A handle whose region was freed says so when it is used (-ESTALE). All functions but
 * kite_submit() may sleep.
 * Functions of one session may be called by several threads at once, except kite_close(), which
 * comes last.
 */
#ifndef _KITE_H
#define _KITE_H

#include <linux/types.h>
#include <uapi/kite.h>

struct kite_session;

/**
 * kite_open() - opens a session.
 * @rnic: name of an RNIC, or NULL for the first with an active port, or if none is active the
 *	first.
 *
 * Return: the session, or ERR_PTR(): -ENODEV, -ENOMEM.
 */
struct kite_session *kite_open(const char *rnic);

/**
 * kite_close() - closes a session and gives back all it had.
 * @session: the session, used by nobody else any more.
 */
void kite_close(struct kite_session *session);

/**
 * kite_set_priority() - sets the priority of the session's requests, from now on.
 * @session: the session.
 * @priority: KITE_PRIORITY_HIGH, as it is at first, or KITE_PRIORITY_LOW.
 *
 * Return: 0, or -EINVAL.
 */
int kite_set_priority(struct kite_session *session, u32 priority);

/**
 * kite_alloc() - allocates a region.
 * @session: the session.
 * @name: name of the region, or NULL or "" for an anonymous one, which ends with the session.
 * @len: bytes, at least 1.
 * @nodes: the nodes to stripe over; NULL only if @node_count is 0.
 * @node_count: number of @nodes, at most KITE_STRIPE_MAX, or 0 for this node alone.
 * @others: rights of users other than root.
 * @handle: set to a handle with all rights.
 *
 * Return: 0, or an error as for KITE_IOC_ALLOC.
 */
int kite_alloc(struct kite_session *session, const char *name, u64 len, const u32 *nodes,
	       u32 node_count, u32 others, u64 *handle);

/**
 * kite_register() - makes a region of kernel memory.
 * @session: the session.
 * @buf: the memory, from the page allocator or vmalloc(), which begins at a page.
 * @len: bytes. The rest of the last page is the region's, too.
 * @name: name, or NULL or "" for an anonymous region.
 * @others: rights of users other than root.
 * @release: called once, with @context, when nobody reaches the memory any more, which has to stay
 *	until then: also if this fails. It may sleep.
 * @context: for @release.
 * @handle: set to a handle with all rights.
 *
 * The region is freed by kite_free() or another master, and an anonymous one by kite_unmap() and
 * kite_close(); none of them waits for @release.
 *
 * Return: 0, or an error as for KITE_IOC_REGISTER.
 */
int kite_register(struct kite_session *session, void *buf, size_t len, const char *name, u32 others,
		  void (*release)(void *context), void *context, u64 *handle);

/**
 * kite_map() - opens a region by name.
 * @session: the session.
 * @name: its name; NULL and "" are none, and -EINVAL.
 * @rights: the rights wanted, at least one.
 * @handle: set to a new handle.
 * @len: set to the length of the region in bytes, unless NULL.
 *
 * Return: 0, or an error as for KITE_IOC_MAP.
 */
int kite_map(struct kite_session *session, const char *name, u32 rights, u64 *handle, u64 *len);

/**
 * kite_unmap() - gives a handle back.
 * @session: the session.
 * @handle: the handle.
 *
 * Return: 0, -EBADF, or -ENODEV if the RNIC was removed, and the handle with it.
 */
int kite_unmap(struct kite_session *session, u64 handle);

/**
 * kite_free() - frees a region, and gives the handle back.
 * @session: the session.
 * @handle: a handle with KITE_MASTER.
 *
 * Return: 0, or an error as for KITE_IOC_FREE.
 */
int kite_free(struct kite_session *session, u64 handle);

/**
 * kite_grant() - changes who has which rights to a region.
 * @session: the session.
 * @handle: a handle with KITE_MASTER.
 * @uid: the user, or 0 with KITE_GRANT_OTHERS.
 * @rights: the rights.
 * @flags: 0 or KITE_GRANT_OTHERS.
 *
 * Return: 0, or an error as for KITE_IOC_GRANT.
 */
int kite_grant(struct kite_session *session, u64 handle, u32 uid, u32 rights, u32 flags);

/**
 * kite_migrate() - moves a region to other nodes, while it is used.
 * @session: the session.
 * @handle: a handle with KITE_MASTER.
 * @nodes: as for kite_alloc().
 * @node_count: as for kite_alloc().
 * @timeout_ms: deadline in milliseconds, or 0 for the default of the module.
 *
 * Return: 0, or an error as for KITE_IOC_MIGRATE.
 */
int kite_migrate(struct kite_session *session, u64 handle, const u32 *nodes, u32 node_count,
	      u32 timeout_ms);

/**
 * kite_read() - reads from a region.
 * @session: the session.
 * @handle: a handle with KITE_READ.
 * @offset: first byte in the region.
 * @buf: kernel memory, not on the stack.
 * @len: bytes.
 *
 * Return: 0, or an error as for KITE_IOC_READ.
 */
int kite_read(struct kite_session *session, u64 handle, u64 offset, void *buf, size_t len);

/**
 * kite_write() - writes to a region.
 * @session: the session.
 * @handle: a handle with KITE_WRITE.
 * @offset: first byte in the region.
 * @buf: kernel memory, not on the stack.
 * @len: bytes.
 *
 * Return: 0, or an error as for KITE_IOC_WRITE.
 */
int kite_write(struct kite_session *session, u64 handle, u64 offset, const void *buf, size_t len);

/**
 * struct kite_vector - bytes of a region, and of kernel memory.
 * @offset: first byte in the region.
 * @buf: kernel memory, not on the stack, which a write does not change.
 * @len: bytes.
 */
struct kite_vector {
	u64 offset;
	void *buf;
	size_t len;
};

/**
 * kite_readv() - reads several parts of a region.
 * @session: the session.
 * @handle: a handle with KITE_READ.
 * @vectors: what to read, and to where.
 * @count: how many, at most KITE_SEGMENTS_MAX.
 *
 * Return: 0, or an error as for KITE_IOC_READV.
 */
int kite_readv(struct kite_session *session, u64 handle, const struct kite_vector *vectors,
	       u32 count);

/**
 * kite_writev() - writes several parts of a region.
 * @session: the session.
 * @handle: a handle with KITE_WRITE.
 * @vectors: what to write, and from where.
 * @count: how many, at most KITE_SEGMENTS_MAX.
 *
 * Return: 0, or an error as for KITE_IOC_WRITEV.
 */
int kite_writev(struct kite_session *session, u64 handle, const struct kite_vector *vectors,
		u32 count);

/**
 * kite_fill() - sets bytes of a region.
 * @session: the session.
 * @handle: a handle with KITE_WRITE.
 * @offset: the first of them in the region.
 * @byte: what all are to be.
 * @len: how many.
 *
 * Return: 0, or an error as for KITE_IOC_FILL.
 */
int kite_fill(struct kite_session *session, u64 handle, u64 offset, u8 byte, u64 len);

/**
 * kite_copy() - copies between regions, or within one.
 * @session: the session.
 * @to: handle of the destination, with KITE_WRITE.
 * @to_offset: its first byte.
 * @from: handle of the source, with KITE_READ.
 * @from_offset: its first byte.
 * @len: bytes.
 *
 * Return: 0, or an error as for KITE_IOC_COPY.
 */
int kite_copy(struct kite_session *session, u64 to, u64 to_offset, u64 from, u64 from_offset,
	      u64 len);

/**
 * kite_atomic() - changes eight bytes of a region in one step.
 * @session: the session.
 * @handle: a handle with KITE_READ and KITE_WRITE.
 * @offset: the first of them in the region, a multiple of 8.
 * @operation: KITE_ATOMIC_*.
 * @operand: see there.
 * @expected: for KITE_ATOMIC_COMPARE_SWAP, else zero.
 * @value: set to what they were before, unless NULL.
 *
 * Return: 0, or an error as for KITE_IOC_ATOMIC.
 */
int kite_atomic(struct kite_session *session, u64 handle, u64 offset, u32 operation, u64 operand,
		u64 expected, u64 *value);

/**
 * kite_serve() - makes the session a server of a region, which others can call.
 * @session: the session.
 * @handle: a handle with KITE_MASTER, of a region of this node.
 * @ring_size: bytes of the ring of each node that calls, or 0; see struct kite_serve.
 * @data_max: most bytes of data of a call or message, or 0; see struct kite_serve.
 *
 * It serves until the handle is given back. There may be any number of servers.
 *
 * Return: 0, or an error as for KITE_IOC_SERVE.
 */
int kite_serve(struct kite_session *session, u64 handle, u32 ring_size, u32 data_max);

/**
 * kite_receive() - waits for a call or message.
 * @session: the session.
 * @handle: the handle by which it serves a region.
 * @buf: kernel memory for the data, not on the stack.
 * @len: bytes there, as many as kite_serve() allows for any call to fit.
 * @timeout_ms: how long to wait, or 0 for the default of the module.
 * @got: call, len, function, node and uid are set.
 *
 * Return: 0, or an error as for KITE_IOC_RECEIVE.
 */
int kite_receive(struct kite_session *session, u64 handle, void *buf, size_t len, u32 timeout_ms,
		 struct kite_receive *got);

/**
 * kite_reply() - answers a call.
 * @session: the session.
 * @call: number of the call.
 * @data: the data of the reply.
 * @len: bytes of it.
 *
 * Return: 0, or an error as for KITE_IOC_REPLY.
 */
int kite_reply(struct kite_session *session, u64 call, const void *data, size_t len);

/**
 * kite_reply_abort() - tells the caller that there will be no answer.
 * @session: the session.
 * @call: number of the call.
 *
 * Return: 0, or -EBADF.
 */
int kite_reply_abort(struct kite_session *session, u64 call);

/**
 * kite_call() - calls a server of a region and waits for the reply.
 * @session: the session.
 * @handle: a handle with KITE_WRITE.
 * @function: number for the server.
 * @data: the data of the call.
 * @len: bytes of it, at most KITE_DATA_MAX.
 * @reply: kernel memory for the data of the reply, not on the stack.
 * @reply_len: bytes there; set to those of the reply.
 *
 * Return: 0, or an error as for KITE_IOC_CALL.
 */
int kite_call(struct kite_session *session, u64 handle, u32 function, const void *data, size_t len,
	      void *reply, size_t *reply_len);

/**
 * kite_send() - sends a message to a server of a region.
 * @session: the session.
 * @handle: a handle with KITE_WRITE.
 * @function: number for the server.
 * @data: the data of the message.
 * @len: bytes of it, at most KITE_DATA_MAX.
 *
 * Return: 0, or an error as for KITE_IOC_CALL with KITE_CALL_ONEWAY.
 */
int kite_send(struct kite_session *session, u64 handle, u32 function, const void *data, size_t len);

/**
 * kite_lock() - takes a lock of a region.
 * @session: the session.
 * @handle: a handle with KITE_WRITE, or KITE_READ to share.
 * @number: which lock.
 * @flags: KITE_LOCK_*.
 * @timeout_ms: how long to wait, or 0 for the default of the module.
 * @lock: set to the number to unlock it by.
 *
 * Return: 0; 1 if another died with it, see struct kite_lock; or an error as for KITE_IOC_LOCK.
 */
int kite_lock(struct kite_session *session, u64 handle, u64 number, u32 flags, u32 timeout_ms,
	      u64 *lock);

/**
 * kite_unlock() - gives a lock back.
 * @session: the session.
 * @lock: its number.
 * @flags: 0 or KITE_UNLOCK_OWNER_DIED.
 *
 * Return: 0, or an error as for KITE_IOC_UNLOCK.
 */
int kite_unlock(struct kite_session *session, u64 lock, u32 flags);

/**
 * kite_barrier() - waits until as many have come to a barrier of a region as are to come.
 * @session: the session.
 * @handle: a handle with KITE_WRITE.
 * @number: which barrier.
 * @count: as how many, at least 1.
 * @timeout_ms: how long to wait, or 0 for the default of the module.
 * @generation: set to how often the barrier was passed, unless NULL.
 *
 * Return: 0, or an error as for KITE_IOC_BARRIER.
 */
int kite_barrier(struct kite_session *session, u64 handle, u64 number, u32 count, u32 timeout_ms,
		 u64 *generation);

/**
 * typedef kite_done_t - is called when a submission has completed.
 * @context: as given to kite_queue_open().
 * @tag: as in the submission.
 * @error: 0, or the error that the request would have; -ENOTTY if it is none of those that are
 *	taken; -ECANCELED if it was given up, or the queue pair closed; -ENODEV if the RNIC was
 *	removed.
 * @value: see struct kite_cqe.
 *
 * It is called by any thread, and by several at once. It must not sleep; it may call
 * kite_submit(), but no other function of the queue pair.
 */
typedef void (*kite_done_t)(void *context, u64 tag, int error, u64 value);

struct kite_queue;

/**
 * kite_queue_open() - makes a queue pair, for requests that are done while the module goes on.
 * @session: the session, which may have KITE_QUEUES_MAX of them.
 * @entries: how many requests may be under way, a power of two up to KITE_QUEUE_ENTRIES_MAX.
 * @done: is called once for each submission.
 * @context: is given to it.
 *
 * Return: the queue pair, or ERR_PTR(): -EBUSY, -EINVAL, -ENODEV, -ENOMEM.
 */
struct kite_queue *kite_queue_open(struct kite_session *session, u32 entries, kite_done_t done,
					void *context);

/**
 * kite_submit() - has a request done.
 * @pair: the queue pair.
 * @submission: the request, which is copied. Its pointers are to kernel memory, which must stay
 *	until the request completes. KITE_IOC_PUSH is not taken: kite_push() is no system call.
 *
 * Requests may be begun and done in any order. This does not sleep, but must be called by a thread,
 * not by an interrupt or timer. Several threads may call it at once.
 *
 * Return: 0; -EAGAIN if as many wait to be begun as there may be under way; -ECANCELED if the queue
 * pair is being closed; -ENODEV if the RNIC was removed.
 */
int kite_submit(struct kite_queue *pair, const struct kite_sqe *submission);

/**
 * kite_cancel() - gives up a submission, which then completes with -ECANCELED.
 * @pair: the queue pair.
 * @tag: its tag.
 *
 * Return: 0, or an error as for KITE_IOC_CANCEL.
 */
int kite_cancel(struct kite_queue *pair, u64 tag);

/**
 * kite_queue_close() - ends a queue pair, before its session.
 * @pair: the queue pair. Nobody else uses it any more.
 *
 * What is under way completes before this returns, if not otherwise with -ECANCELED.
 */
void kite_queue_close(struct kite_queue *pair);

/*
 * Virtual queue pairs: verbs to a node, as processes have them. Requests name memory by the key
 * that kite_reg_mr() gives, and by addresses from 0 on: the first byte has 0.
 */

/**
 * kite_reg_mr() - registers kernel memory for virtual queue pairs.
 * @session: the session.
 * @buf: the memory, from the page allocator or vmalloc(), which begins at a page.
 * @len: bytes, 1 ... KITE_MR_SIZE_MAX.
 * @others: as in struct kite_reg_mr.
 * @release: called once, with @context, when no RNIC reaches the memory any more, which has to stay
 *	until then: also if this fails. It may sleep.
 * @context: for @release.
 * @key: set to its key.
 *
 * Return: 0, or an error as for KITE_IOC_REG_MR.
 */
int kite_reg_mr(struct kite_session *session, void *buf, size_t len, u32 others,
			 void (*release)(void *context), void *context, u32 *key);

/**
 * kite_dereg_mr() - takes memory back, as kite_close() does with all.
 * @session: the session.
 * @key: its key.
 *
 * Neither waits for the memory to be released, which takes some seconds.
 *
 * Return: 0, or -EBADF.
 */
int kite_dereg_mr(struct kite_session *session, u32 key);

/**
 * kite_connect() - makes a virtual queue pair to a node, which hears nothing of it.
 * @session: the session.
 * @node: the node, without DC not this one.
 * @port: who listens there at this port gets messages; or 0.
 * @timeout_ms: deadline in milliseconds, or 0 for the default of the module.
 * @vqp: set to its number.
 *
 * Return: 0, or an error as for KITE_IOC_CONNECT.
 */
int kite_connect(struct kite_session *session, u32 node, u32 port, u32 timeout_ms, u64 *vqp);

/**
 * kite_listen() - listens at a port for those who connect to it.
 * @session: the session.
 * @port: the port, not 0.
 * @listener: set to a number for it.
 *
 * Return: 0, or an error as for KITE_IOC_LISTEN.
 */
int kite_listen(struct kite_session *session, u32 port, u64 *listener);

/**
 * kite_accept() - takes a virtual queue pair whose other end has sent a message to a port.
 * @session: the session.
 * @accepted: as for KITE_IOC_ACCEPT.
 *
 * Return: 0, or an error as for KITE_IOC_ACCEPT.
 */
int kite_accept(struct kite_session *session, struct kite_accept *accepted);

/**
 * kite_disconnect() - ends a virtual queue pair, or listening at a port.
 * @session: the session.
 * @vqp: its number, or that of who listens.
 *
 * Return: 0, or -EBADF.
 */
int kite_disconnect(struct kite_session *session, u64 vqp);

/**
 * kite_push() - adds requests to a virtual queue pair: all of them, or none.
 * @session: the session.
 * @vqp: its number.
 * @works: the requests.
 * @count: how many, 1 ... KITE_PUSH_MAX.
 *
 * Return: 0, or an error as for KITE_IOC_PUSH.
 */
int kite_push(struct kite_session *session, u64 vqp, const struct kite_send_wr *works, u32 count);

/**
 * kite_pop() - takes completions of a virtual queue pair, in the order of their requests.
 * @session: the session.
 * @vqp: its number.
 * @done: where they go; see struct kite_pop for their errors.
 * @count: how many there is room for, at least 1.
 * @timeout_ms: how long to wait for one, or 0 not to.
 *
 * Return: how many there were, or an error as for KITE_IOC_POP.
 */
int kite_pop(struct kite_session *session, u64 vqp, struct kite_cqe *done, u32 count,
	     u32 timeout_ms);

/**
 * kite_pop_message() - takes the first message of a virtual queue pair, to registered memory.
 * @session: the session.
 * @message: as for KITE_IOC_POP_MESSAGE.
 *
 * Return: 0, or an error as for KITE_IOC_POP_MESSAGE.
 */
int kite_pop_message(struct kite_session *session, struct kite_pop_message *message);

#endif /* _KITE_H */
