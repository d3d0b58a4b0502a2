/* SPDX-License-Identifier: GPL-2.0 */
/*
 * kite for other kernel modules: remote memory regions by name, RPC, locks, barriers, and virtual
 * queue pairs.
 *
 * The functions correspond to the requests of the device; uapi/kite.h documents handles, rights,
 * limits and the meaning of each errno. A module acts as root. It must close its sessions before it
 * is unloaded. Functions without a deadline argument use the module parameter default_timeout_ms,
 * but those that allocate, register, map, unmap and free regions have 10 s (see uapi/kite.h). A
 * longer deadline than one hour counts as one hour. Use of a handle whose region was freed returns
 * -ESTALE.
 *
 * All functions but kite_submit() may sleep. Functions of one session may be called concurrently,
 * except kite_close(), which must be the last call.
 */
#ifndef _KITE_H
#define _KITE_H

#include <linux/types.h>
#include <uapi/kite.h>

struct kite_session;

/**
 * kite_open() - opens a session.
 * @rnic: name of an RNIC, or NULL for the first RNIC with an active port, or else the first RNIC.
 *
 * Return: the session, or ERR_PTR(): -ENODEV, -ENOMEM.
 */
struct kite_session *kite_open(const char *rnic);

/**
 * kite_close() - closes a session and releases its handles, locks and memory.
 * @session: the session, without concurrent users.
 */
void kite_close(struct kite_session *session);

/**
 * kite_set_priority() - sets the priority of later requests of the session.
 * @session: the session.
 * @priority: KITE_PRIORITY_HIGH (the default) or KITE_PRIORITY_LOW.
 *
 * Return: 0, or -EINVAL.
 */
int kite_set_priority(struct kite_session *session, u32 priority);

/**
 * kite_alloc() - allocates a region.
 * @session: the session.
 * @name: name of the region, or NULL or "" for an anonymous region, which is freed with the
 *	session.
 * @len: bytes, at least 1.
 * @nodes: the nodes to stripe over; NULL only if @node_count is 0.
 * @node_count: number of @nodes, at most KITE_STRIPE_MAX, or 0 for this node alone.
 * @other_rights: rights of users other than root.
 * @handle: set to a handle with all rights.
 *
 * Return: 0, or an error as for KITE_IOC_ALLOC.
 */
int kite_alloc(struct kite_session *session, const char *name, u64 len, const u32 *nodes,
	       u32 node_count, u32 other_rights, u64 *handle);

/**
 * kite_register() - registers kernel memory as a region.
 * @session: the session.
 * @buf: page-aligned memory from the page allocator or vmalloc().
 * @len: bytes. The region includes the rest of the last page.
 * @name: name, or NULL or "" for an anonymous region.
 * @other_rights: rights of users other than root.
 * @release: called once with @context, also after an error, when no RNIC can access the memory any
 *	longer. The memory must stay valid until then. @release may sleep.
 * @context: argument of @release.
 * @handle: set to a handle with all rights.
 *
 * kite_free() or another master frees the region; kite_unmap() and kite_close() free an anonymous
 * region. None of these functions waits for @release.
 *
 * Return: 0, or an error as for KITE_IOC_REGISTER.
 */
int kite_register(struct kite_session *session, void *buf, size_t len, const char *name,
		  u32 other_rights,
		  void (*release)(void *context), void *context, u64 *handle);

/**
 * kite_map() - opens a region by name.
 * @session: the session.
 * @name: name of the region; NULL and "" return -EINVAL.
 * @rights: requested rights, at least one.
 * @handle: set to a new handle.
 * @len: set to the length of the region in bytes, unless NULL.
 *
 * Return: 0, or an error as for KITE_IOC_MAP.
 */
int kite_map(struct kite_session *session, const char *name, u32 rights, u64 *handle, u64 *len);

/**
 * kite_unmap() - closes a handle.
 * @session: the session.
 * @handle: the handle.
 *
 * Return: 0; -EBADF; -ENODEV if the RNIC was removed, which closed the handle.
 */
int kite_unmap(struct kite_session *session, u64 handle);

/**
 * kite_free() - frees a region and closes the handle.
 * @session: the session.
 * @handle: a handle with KITE_MASTER.
 *
 * Return: 0, or an error as for KITE_IOC_FREE.
 */
int kite_free(struct kite_session *session, u64 handle);

/**
 * kite_grant() - changes the rights of a user to a region.
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
 * kite_migrate() - moves the memory of a region to other nodes while the region is in use.
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
 * struct kite_vector - a range of a region and a buffer in kernel memory.
 * @offset: first byte in the region.
 * @buf: kernel memory, not on the stack. kite_writev() does not modify the buffer.
 * @len: bytes.
 */
struct kite_vector {
	u64 offset;
	void *buf;
	size_t len;
};

/**
 * kite_readv() - reads several ranges of a region.
 * @session: the session.
 * @handle: a handle with KITE_READ.
 * @vectors: ranges and their destination buffers.
 * @count: number of @vectors, at most KITE_SEGMENTS_MAX.
 *
 * Return: 0, or an error as for KITE_IOC_READV.
 */
int kite_readv(struct kite_session *session, u64 handle, const struct kite_vector *vectors,
	       u32 count);

/**
 * kite_writev() - writes several ranges of a region.
 * @session: the session.
 * @handle: a handle with KITE_WRITE.
 * @vectors: ranges and their source buffers.
 * @count: number of @vectors, at most KITE_SEGMENTS_MAX.
 *
 * Return: 0, or an error as for KITE_IOC_WRITEV.
 */
int kite_writev(struct kite_session *session, u64 handle, const struct kite_vector *vectors,
		u32 count);

/**
 * kite_fill() - fills a range of a region with one byte value.
 * @session: the session.
 * @handle: a handle with KITE_WRITE.
 * @offset: first byte in the region.
 * @byte: the value.
 * @len: bytes.
 *
 * Return: 0, or an error as for KITE_IOC_FILL.
 */
int kite_fill(struct kite_session *session, u64 handle, u64 offset, u8 byte, u64 len);

/**
 * kite_copy() - copies between regions, or within one.
 * @session: the session.
 * @to: handle of the destination, with KITE_WRITE.
 * @to_offset: first byte of the destination.
 * @from: handle of the source, with KITE_READ.
 * @from_offset: first byte of the source.
 * @len: bytes.
 *
 * Return: 0, or an error as for KITE_IOC_COPY.
 */
int kite_copy(struct kite_session *session, u64 to, u64 to_offset, u64 from, u64 from_offset,
	      u64 len);

/**
 * kite_atomic() - executes an atomic operation on 8 bytes of a region.
 * @session: the session.
 * @handle: a handle with KITE_READ and KITE_WRITE.
 * @offset: first byte in the region, a multiple of 8.
 * @operation: KITE_ATOMIC_*.
 * @operand: operand of @operation.
 * @expected: for KITE_ATOMIC_COMPARE_SWAP, else zero.
 * @value: set to the value before the operation, unless NULL.
 *
 * Return: 0, or an error as for KITE_IOC_ATOMIC.
 */
int kite_atomic(struct kite_session *session, u64 handle, u64 offset, u32 operation, u64 operand,
		u64 expected, u64 *value);

/**
 * kite_serve() - makes the session an RPC server of a region.
 * @session: the session.
 * @handle: a handle with KITE_MASTER, of a region of this node.
 * @ring_size: bytes of the ring of each calling node, or 0; see struct kite_serve.
 * @data_max: maximum bytes of a call or message, or 0; see struct kite_serve.
 *
 * The session serves until the handle is closed. A region can have KITE_SERVERS_MAX servers.
 *
 * Return: 0, or an error as for KITE_IOC_SERVE.
 */
int kite_serve(struct kite_session *session, u64 handle, u32 ring_size, u32 data_max);

/**
 * kite_receive() - waits for a call or message.
 * @session: the session.
 * @handle: the handle passed to kite_serve().
 * @buf: kernel memory for the data, not on the stack.
 * @len: bytes of @buf. A buffer of @data_max bytes of kite_serve() fits any call.
 * @timeout_ms: deadline in milliseconds, or 0 for the default of the module.
 * @got: the members call, len, function, node and uid are set.
 *
 * Return: 0, or an error as for KITE_IOC_RECEIVE.
 */
int kite_receive(struct kite_session *session, u64 handle, void *buf, size_t len, u32 timeout_ms,
		 struct kite_receive *got);

/**
 * kite_reply() - replies to a call.
 * @session: the session.
 * @call: number of the call.
 * @data: the data of the reply.
 * @len: bytes of @data.
 *
 * Return: 0, or an error as for KITE_IOC_REPLY.
 */
int kite_reply(struct kite_session *session, u64 call, const void *data, size_t len);

/**
 * kite_reply_abort() - ends a call without a reply; the caller receives -ECONNRESET.
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
 * @function: function number, passed to the server.
 * @data: the data of the call.
 * @len: bytes of @data, at most KITE_DATA_MAX.
 * @reply: kernel memory for the data of the reply, not on the stack.
 * @reply_len: bytes of @reply; set to the length of the reply.
 *
 * Return: 0, or an error as for KITE_IOC_CALL.
 */
int kite_call(struct kite_session *session, u64 handle, u32 function, const void *data, size_t len,
	      void *reply, size_t *reply_len);

/**
 * kite_send() - sends a message to a server of a region.
 * @session: the session.
 * @handle: a handle with KITE_WRITE.
 * @function: function number, passed to the server.
 * @data: the data of the message.
 * @len: bytes of @data, at most KITE_DATA_MAX.
 *
 * Return: 0, or an error as for KITE_IOC_CALL with KITE_CALL_ONEWAY.
 */
int kite_send(struct kite_session *session, u64 handle, u32 function, const void *data, size_t len);

/**
 * kite_lock() - acquires a lock of a region.
 * @session: the session.
 * @handle: a handle with KITE_WRITE, or with KITE_READ for a shared lock.
 * @number: number of the lock.
 * @flags: KITE_LOCK_*.
 * @timeout_ms: deadline in milliseconds, or 0 for the default of the module.
 * @lock: set to the argument of kite_unlock().
 *
 * Return: 0; 1 if a previous owner died with the lock, see struct kite_lock; or an error as for
 * KITE_IOC_LOCK.
 */
int kite_lock(struct kite_session *session, u64 handle, u64 number, u32 flags, u32 timeout_ms,
	      u64 *lock);

/**
 * kite_unlock() - releases a lock.
 * @session: the session.
 * @lock: as set by kite_lock().
 * @flags: 0 or KITE_UNLOCK_OWNER_DIED.
 *
 * Return: 0, or an error as for KITE_IOC_UNLOCK.
 */
int kite_unlock(struct kite_session *session, u64 lock, u32 flags);

/**
 * kite_barrier() - waits at a barrier of a region until @count participants have arrived.
 * @session: the session.
 * @handle: a handle with KITE_WRITE.
 * @number: number of the barrier.
 * @count: number of participants, at least 1.
 * @timeout_ms: deadline in milliseconds, or 0 for the default of the module.
 * @generation: set to the number of completed rounds of the barrier, unless NULL.
 *
 * Return: 0, or an error as for KITE_IOC_BARRIER.
 */
int kite_barrier(struct kite_session *session, u64 handle, u64 number, u32 count, u32 timeout_ms,
		 u64 *generation);

/**
 * typedef kite_done_t - completion handler of an I/O queue.
 * @context: as passed to kite_queue_open().
 * @tag: as in the submission.
 * @error: 0; the error of the request; -ENOTTY if the queue does not accept the request; -ECANCELED
 *	after kite_cancel() or kite_queue_close(); -ENODEV if the RNIC was removed.
 * @value: see struct kite_cqe.
 *
 * The handler may run in any thread, and in several threads concurrently. It must not sleep. It may
 * call kite_submit(), but no other function of the queue.
 */
typedef void (*kite_done_t)(void *context, u64 tag, int error, u64 value);

struct kite_queue;

/**
 * kite_queue_open() - creates an I/O queue, for asynchronous requests.
 * @session: the session, which can have KITE_QUEUES_MAX I/O queues.
 * @entries: maximum requests in flight, a power of two up to KITE_QUEUE_ENTRIES_MAX.
 * @done: called once for each submission.
 * @context: argument of @done.
 *
 * Return: the I/O queue, or ERR_PTR(): -EBUSY, -EINVAL, -ENODEV, -ENOMEM.
 */
struct kite_queue *kite_queue_open(struct kite_session *session, u32 entries, kite_done_t done,
				   void *context);

/**
 * kite_submit() - submits a request.
 * @queue: the I/O queue.
 * @sqe: the request, which is copied. Its pointers are to kernel memory, which must stay
 *	valid until the request completes. KITE_IOC_PUSH is not accepted: use kite_push().
 *
 * Requests may start and complete in any order. The function does not sleep. It must be called in
 * thread context, not by an interrupt handler or timer. It may be called concurrently.
 *
 * Return: 0; -EAGAIN if @entries requests are submitted and not started; -ECANCELED if the queue is
 * being closed; -ENODEV if the RNIC was removed.
 */
int kite_submit(struct kite_queue *queue, const struct kite_sqe *sqe);

/**
 * kite_cancel() - cancels a submission, which completes with -ECANCELED.
 * @queue: the I/O queue.
 * @tag: tag of the submission.
 *
 * Return: 0, or an error as for KITE_IOC_CANCEL.
 */
int kite_cancel(struct kite_queue *queue, u64 tag);

/**
 * kite_queue_close() - destroys an I/O queue. Must precede kite_close().
 * @queue: the I/O queue, without concurrent users.
 *
 * Requests in flight complete before the function returns, some of them with -ECANCELED.
 */
void kite_queue_close(struct kite_queue *queue);

/*
 * Virtual queue pairs (VQPs): verbs to one node, as for processes. Work requests name memory by the
 * key from kite_reg_mr() and an offset: the first byte of the memory has address 0.
 */

/**
 * kite_reg_mr() - registers kernel memory for virtual queue pairs.
 * @session: the session.
 * @buf: page-aligned memory from the page allocator or vmalloc().
 * @len: bytes, 1 ... KITE_MR_SIZE_MAX.
 * @other_rights: as in struct kite_reg_mr.
 * @release: called once with @context, also after an error, when no RNIC can access the memory any
 *	longer. The memory must stay valid until then. @release may sleep.
 * @context: argument of @release.
 * @key: set to the key of the memory.
 *
 * Return: 0, or an error as for KITE_IOC_REG_MR.
 */
int kite_reg_mr(struct kite_session *session, void *buf, size_t len, u32 other_rights,
		void (*release)(void *context), void *context, u32 *key);

/**
 * kite_dereg_mr() - deregisters memory. kite_close() deregisters all memory of a session.
 * @session: the session.
 * @key: key of the memory.
 *
 * Neither function waits for the release of the memory, up to 2.5 s later.
 *
 * Return: 0, or -EBADF.
 */
int kite_dereg_mr(struct kite_session *session, u32 key);

/**
 * kite_connect() - creates a VQP to a node. No message is sent to the node.
 * @session: the session.
 * @node: the node; without DC another node than this one.
 * @port: port of the listener that receives messages, or 0.
 * @timeout_ms: deadline in milliseconds, or 0 for the default of the module.
 * @vqp: set to the number of the VQP.
 *
 * Return: 0, or an error as for KITE_IOC_CONNECT.
 */
int kite_connect(struct kite_session *session, u32 node, u32 port, u32 timeout_ms, u64 *vqp);

/**
 * kite_listen() - creates a listener for VQPs at a port.
 * @session: the session.
 * @port: the port, not 0.
 * @listener: set to the number of the listener.
 *
 * Return: 0, or an error as for KITE_IOC_LISTEN.
 */
int kite_listen(struct kite_session *session, u32 port, u64 *listener);

/**
 * kite_accept() - accepts a VQP whose other end has sent a message to a port.
 * @session: the session.
 * @accepted: as for KITE_IOC_ACCEPT.
 *
 * Return: 0, or an error as for KITE_IOC_ACCEPT.
 */
int kite_accept(struct kite_session *session, struct kite_accept *accepted);

/**
 * kite_close_vqp() - closes a VQP.
 * @session: the session.
 * @vqp: number of the VQP.
 *
 * Return: 0, or -EBADF.
 */
int kite_close_vqp(struct kite_session *session, u64 vqp);

/**
 * kite_close_listener() - closes a listener. Accepted VQPs stay open.
 * @session: the session.
 * @listener: number of the listener.
 *
 * Return: 0, or -EBADF.
 */
int kite_close_listener(struct kite_session *session, u64 listener);

/**
 * kite_push() - pushes work requests to a VQP: all of them, or none.
 * @session: the session.
 * @vqp: number of the VQP.
 * @wrs: the work requests.
 * @count: number of @wrs, 1 ... KITE_PUSH_MAX.
 *
 * Return: 0, or an error as for KITE_IOC_PUSH.
 */
int kite_push(struct kite_session *session, u64 vqp, const struct kite_send_wr *wrs, u32 count);

/**
 * kite_pop() - pops completions of a VQP, in the order of the work requests.
 * @session: the session.
 * @vqp: number of the VQP.
 * @done: destination of the completions; see struct kite_pop for their errors.
 * @count: maximum completions, at least 1.
 * @flags: 0 or KITE_NOWAIT.
 * @timeout_ms: maximum wait for the first completion in milliseconds, or 0 for the default of the
 *	module.
 *
 * Return: the number of completions, or an error as for KITE_IOC_POP.
 */
int kite_pop(struct kite_session *session, u64 vqp, struct kite_cqe *done, u32 count, u32 flags,
	     u32 timeout_ms);

/**
 * kite_pop_message() - pops the first message of a VQP into registered memory.
 * @session: the session.
 * @message: as for KITE_IOC_POP_MESSAGE.
 *
 * Return: 0, or an error as for KITE_IOC_POP_MESSAGE.
 */
int kite_pop_message(struct kite_session *session, struct kite_pop_message *message);

#endif /* _KITE_H */
