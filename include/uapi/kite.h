/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The ABI of /dev/kite.
 *
 * An open file is a session. It is bound to one RNIC by KITE_IOC_BIND, which also checks the
 * version of this ABI; before that, every other request but KITE_IOC_QUERY_RNIC and KITE_IOC_GET_PARAMETERS
 * answers ENOTCONN. A session owns handles to memory regions (LMRs) and anonymous regions; closing
 * it gives all of them back.
 *
 * Rules that hold for every request:
 *  - The number of a request encodes the size of its structure; another size is another request.
 *  - Fields named reserved, and bits that are not defined, must be zero: EINVAL.
 *  - Pointers are __u64. A pointer that cannot be read or written: EFAULT.
 *  - A request of unknown number or size: ENOTTY.
 *  - Integers are in the byte order of the machine.
 *  - Results are written only on success. Of an array some may be written before an EFAULT.
 *  - Any request of a bound session may answer ENODEV, when the RNIC was removed, and ENOMEM.
 *
 * What each errno means, everywhere in kite:
 *  EACCES           the user has not the right, or no more, or the handle was mapped without it
 *  EAGAIN           nothing to report or to take now; another has the lock
 *  EBADF            no such handle, call to answer, lock to unlock, queue pair or key in this
 *                   session
 *  EBUSY            already done by somebody: a bound session, an RNIC with a daemon, a handle
 *                   that is served, a session with all its queue pairs, a region that is moving
 *  ECANCELED        the process gave up what it had submitted
 *  EADDRINUSE       somebody listens at the port
 *  ECONNREFUSED     nobody serves the region, or listens at the port
 *  ECONNRESET       the server ended before it replied, or the other end of a queue pair did
 *  EEXIST           the name is taken
 *  EHOSTDOWN        a node that holds the region is not in the view
 *  EHOSTUNREACH     this node is in no cluster: no daemon gave it a view
 *  EINVAL           a field has a value that this header does not allow
 *  EIO              the RNIC or the peer refused the operation
 *  EINTR            a signal ended a read or write, of which an unknown part was done, or the wait
 *                   for a call, a lock, a barrier or completions, or a request that connects,
 *                   accepts, pushes or pops by virtual queue pairs; any other request is
 *                   interrupted only by a signal that kills the caller
 *  EMSGSIZE         longer than any message, or than the buffer that it is for
 *  ENAMETOOLONG     a name without terminating zero
 *  ENOBUFS          a virtual queue pair is full: pop
 *  ENODEV           no such RNIC, or it was removed
 *  ENOENT           no region of that name, no RNIC of that index, no memory of that key, or
 *                   nothing to cancel
 *  ENOSPC           there are as many limits as there can be
 *  ENOMEM           no memory here or at the node asked, or its cap on such memory is reached
 *  ENOTCONN         KITE_IOC_BIND comes first
 *  ENOTTY           no such request
 *  EOPNOTSUPP       this handle is not served
 *  ENXIO            an RNIC has no key to so much memory, or no atomic operations for that of
 *                   the other node
 *  EPERM            only the daemon, or who has CAP_NET_ADMIN, may do this
 *  EPROTONOSUPPORT  the version of the ABI is not the kernel's
 *  ERANGE           offset and length reach outside the region
 *  EREMOTE          the region belongs to another node
 *  ESTALE           the region was freed
 *  ETIMEDOUT        the deadline passed
 */
#ifndef _UAPI_KITE_H
#define _UAPI_KITE_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Changed only when an existing request changes its meaning. */
#define KITE_ABI_VERSION 1

#define KITE_DEVICE "/dev/kite"

/* Sizes of names, with their terminating zero. */
#define KITE_NAME_SIZE 64
#define KITE_RNIC_NAME_SIZE 64

/* Most nodes that one region can be striped over, and most members of a view. */
#define KITE_STRIPE_MAX 64
#define KITE_NODES_MAX 1024

/* Node numbers are 1 … KITE_NODE_MAX; 0 stands for this node. */
#define KITE_NODE_SELF 0
#define KITE_NODE_MAX 65535

/* Rights to a region. */
#define KITE_READ (1 << 0) /* read its memory */
#define KITE_WRITE (1 << 1) /* write its memory, and call its servers */
#define KITE_MASTER (1 << 2) /* serve it, free it, move it, and grant rights to it */
#define KITE_RIGHTS (KITE_READ | KITE_WRITE | KITE_MASTER)

/**
 * struct kite_bind - ties the session to an RNIC, once.
 * @version: in: KITE_ABI_VERSION.
 * @reserved: zero.
 * @rnic: in: name of an RNIC, or "" for the first with an active port, or if none is
 *	active the first; out: the name taken.
 *
 * EPROTONOSUPPORT, ENODEV, EBUSY (bound already), ENAMETOOLONG. After EFAULT the session may be
 * bound, if @rnic could be read and not written.
 */
struct kite_bind {
	__u32 version;
	__u32 reserved;
	char rnic[KITE_RNIC_NAME_SIZE];
};

/**
 * struct kite_alloc - allocates a region and returns a handle with all rights.
 * @len: in: bytes, at least 1, at most what the nodes have. The memory is zeroed.
 * @nodes: in: pointer to @node_count numbers (__u32) of the nodes to stripe over, chunk by chunk,
 *	in this order.
 * @node_count: in: 1 … KITE_STRIPE_MAX, or 0 for this node alone.
 * @others: in: rights of users other than the owner (the caller's effective user) and root.
 * @name: in: name, unique in the cluster, or "" for an anonymous region, which ends with the
 *	session.
 * @handle: out: the handle, never 0.
 *
 * A named region lives until a master frees it, or until this node leaves the cluster.
 * EEXIST, EHOSTDOWN (a node is not in the view), EHOSTUNREACH, EINVAL, ENAMETOOLONG, ENOMEM,
 * ETIMEDOUT (after some seconds, and four more for each GiB, which has to be zeroed).
 */
struct kite_alloc {
	__u64 len;
	__u64 nodes;
	__u32 node_count;
	__u32 others;
	char name[KITE_NAME_SIZE];
	__u64 handle;
};

/**
 * struct kite_register - makes a region of memory of the process, and returns a handle with all
 * rights.
 * @addr: in: the memory, which the process may write; begins at a page.
 * @len: in: bytes, at least 1. The memory stays what it is.
 * @others: in: as for struct kite_alloc.
 * @reserved: zero.
 * @name: in: as for struct kite_alloc.
 * @handle: out: the handle, never 0.
 *
 * The process goes on using the memory, at the same time as others use the region. Its pages are
 * pinned for as long as the region lives, and count against RLIMIT_MEMLOCK; when the process unmaps
 * them or ends, a region with a name has them still. After a fork they are the parent's. Where they
 * are contiguous, as huge pages are, they are reached in larger pieces.
 * EEXIST, EFAULT, EHOSTDOWN, EHOSTUNREACH, EINTR, EINVAL (also if it has a page twice),
 * ENAMETOOLONG, ENOMEM (also over RLIMIT_MEMLOCK), ETIMEDOUT.
 */
struct kite_register {
	__u64 addr;
	__u64 len;
	__u32 others;
	__u32 reserved;
	char name[KITE_NAME_SIZE];
	__u64 handle;
};

/**
 * struct kite_map - opens a region by name.
 * @name: in: its name.
 * @rights: in: the rights wanted, at least one; the handle has exactly these.
 * @reserved: zero.
 * @handle: out: a new handle.
 * @len: out: length of the region in bytes.
 *
 * EACCES, EHOSTDOWN (the owner died), EHOSTUNREACH, EINVAL, ENAMETOOLONG, ENOENT, ENOMEM,
 * ETIMEDOUT.
 */
struct kite_map {
	char name[KITE_NAME_SIZE];
	__u32 rights;
	__u32 reserved;
	__u64 handle;
	__u64 len;
};

/**
 * struct kite_handle - names a handle, for KITE_IOC_UNMAP and KITE_IOC_FREE.
 * @handle: in: the handle.
 *
 * KITE_IOC_UNMAP gives the handle back; an anonymous region goes with its last handle. EBADF.
 *
 * KITE_IOC_FREE needs KITE_MASTER. It removes the name, makes the handles of all other mappers
 * stale (they see ESTALE, and KITE_EVENT_STALE if they poll), gives this handle back, and returns
 * when nobody can reach the memory any more. If it fails the handle stays, but after ETIMEDOUT it
 * may be stale: then the region is being freed. EACCES, EBADF, EHOSTDOWN, ESTALE, ETIMEDOUT.
 *
 * The numbers of handles are not used again in the same session.
 */
struct kite_handle {
	__u64 handle;
};

/* Means all users that are not named. */
#define KITE_GRANT_OTHERS 1

/* Most users that are named in the grants of one region. */
#define KITE_GRANTS_MAX 1024

/**
 * struct kite_grant - changes who has which rights to a region.
 * @handle: in: the handle, with KITE_MASTER.
 * @uid: in: the user, who gets @rights instead of those of others; zero with KITE_GRANT_OTHERS.
 * @rights: in: the rights, none to none.
 * @flags: in: 0 or KITE_GRANT_OTHERS.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * Handles of users who have lost a right that these were mapped with end: they see EACCES, and
 * KITE_EVENT_STALE if they poll. On success nothing is done by them any more, but for calls
 * that wait for room in the ring of their server. A user that was named stays named. After
 * EHOSTDOWN, EHOSTUNREACH, EIO, ENODEV, ENOMEM, ESTALE and ETIMEDOUT it may have been done, or may
 * yet be, and such handles may still be in use.
 * EACCES, EBADF, EHOSTDOWN, EHOSTUNREACH, EINVAL (root and the owner, who have all rights), EIO,
 * ENOMEM (also for more than KITE_GRANTS_MAX), ESTALE, ETIMEDOUT.
 */
struct kite_grant {
	__u64 handle;
	__u32 uid;
	__u32 rights;
	__u32 flags;
	__u32 timeout_ms;
};

/**
 * struct kite_migrate - moves a region to other nodes, while it is used.
 * @handle: in: the handle, with KITE_MASTER.
 * @nodes: in: as for struct kite_alloc.
 * @node_count: in: as for struct kite_alloc.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * All handles stay as they are, and nothing that was written is lost; who uses the region waits
 * now and then, until a few chunks (see struct kite_query_region) have moved. Its owner goes on to be the
 * node that allocated it. Chunks that are where they should be stay there. Memory of a process or a
 * module (KITE_IOC_REGISTER) is let go; what they write to it themselves meanwhile is lost.
 *
 * If it fails, a part of the chunks may have moved. What has moved to a node that died is lost with
 * it. When the caller is killed, or does not hear from the owner, which it waits for a while longer
 * than the deadline, it goes on until then.
 * EACCES, EBADF, EBUSY (it is moving already), EHOSTDOWN, EHOSTUNREACH, EINVAL, EIO, ENOMEM (also
 * if a node has no pieces of the size of the chunks), ESTALE, ETIMEDOUT.
 */
struct kite_migrate {
	__u64 handle;
	__u64 nodes;
	__u32 node_count;
	__u32 timeout_ms;
};

/**
 * struct kite_rw - reads or writes a region, synchronously.
 * @handle: in: the handle, with KITE_READ or KITE_WRITE.
 * @offset: in: first byte in the region.
 * @addr: in: the user buffer.
 * @len: in: bytes; 0 checks the handle and offset alone.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * On success all of @len was moved, and a write is visible to any later read by any node. On
 * error an unknown part was. Bytes are moved in no particular order; there is no atomicity beyond
 * one byte. The deadline does not end a wait for the buffer's own pages, which may be those of a
 * file whose owner keeps them back. Long parts are pinned, and count against RLIMIT_MEMLOCK
 * while they are; where the limit leaves no room they are copied, which takes longer. EACCES,
 * EBADF, EHOSTDOWN, EINTR, EIO, ENODEV, ENOMEM (there is no memory, or the kernel takes the
 * buffer's pages away as fast as they come), ERANGE, ESTALE, ETIMEDOUT.
 */
struct kite_rw {
	__u64 handle;
	__u64 offset;
	__u64 addr;
	__u64 len;
	__u32 timeout_ms;
	__u32 reserved;
};

/* Most segments of one request. */
#define KITE_SEGMENTS_MAX 1024

/**
 * struct kite_segment - bytes of a region, and of memory.
 * @offset: first byte in the region.
 * @addr: the user buffer.
 * @len: bytes.
 */
struct kite_segment {
	__u64 offset;
	__u64 addr;
	__u64 len;
};

/**
 * struct kite_rwv - reads or writes several parts of a region, synchronously.
 * @handle: in: the handle, with KITE_READ or KITE_WRITE.
 * @segments: in: address of the segments, struct kite_segment.
 * @count: in: how many, at most KITE_SEGMENTS_MAX; none check the handle alone.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * As struct kite_rw, for all of them, of which several are under way at once; but signals that the
 * process survives do not end it. If one is not in the region none is moved.
 * Also EFAULT, and EINVAL for too many segments, or more bytes than there are addresses.
 */
struct kite_rwv {
	__u64 handle;
	__u64 segments;
	__u32 count;
	__u32 timeout_ms;
};

/**
 * struct kite_fill - sets bytes of a region.
 * @handle: in: the handle, with KITE_WRITE.
 * @offset: in: the first of them in the region.
 * @len: in: how many; 0 checks the handle and offset alone.
 * @byte: in: what all are to be, at most 255.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * Done by the nodes that have the memory. As for a write, on success any later read sees it, and on
 * error an unknown part was done. After EHOSTDOWN, EHOSTUNREACH, EIO, ESTALE and ETIMEDOUT some of
 * it, at most 256 KiB, may yet be done.
 * EACCES, EBADF, EHOSTDOWN, EHOSTUNREACH, EINVAL, EIO, ENOMEM, ERANGE, ESTALE, ETIMEDOUT.
 */
struct kite_fill {
	__u64 handle;
	__u64 offset;
	__u64 len;
	__u32 byte;
	__u32 timeout_ms;
};

/**
 * struct kite_copy - copies between regions, or within one.
 * @from: in: handle of the source, with KITE_READ.
 * @from_offset: in: its first byte.
 * @to: in: handle of the destination, with KITE_WRITE; may be @from, or another of its region.
 * @to_offset: in: its first byte.
 * @len: in: bytes; 0 checks the handles and offsets alone.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * Where the two overlap, the destination gets what the source was. Done by the node that has the
 * memory where one node has both, else by way of this node. As for a write, on success any later
 * read sees it, and on error an unknown part was done. After EHOSTDOWN, EHOSTUNREACH, EIO, ESTALE
 * and ETIMEDOUT some of it, at most 64 KiB, may yet be done.
 * EACCES, EBADF, EHOSTDOWN, EHOSTUNREACH, EINVAL, EIO, ENOMEM, ERANGE, ESTALE, ETIMEDOUT.
 */
struct kite_copy {
	__u64 from;
	__u64 from_offset;
	__u64 to;
	__u64 to_offset;
	__u64 len;
	__u32 timeout_ms;
	__u32 reserved;
};

/* Atomic operations on eight bytes. */
#define KITE_ATOMIC_FETCH_ADD 1 /* adds @operand, modulo 2^64 */
#define KITE_ATOMIC_COMPARE_SWAP 2 /* replaces with @operand what equals @expected */
#define KITE_ATOMIC_SWAP 3 /* replaces with @operand */

/**
 * struct kite_atomic - changes eight bytes of a region in one step.
 * @handle: in: the handle, with KITE_READ and KITE_WRITE.
 * @offset: in: the first of them in the region, a multiple of 8.
 * @operand: in: see KITE_ATOMIC_*.
 * @expected: in: for KITE_ATOMIC_COMPARE_SWAP, else zero.
 * @value: out: what they were before, as a number in the byte order of the machine.
 * @operation: in: KITE_ATOMIC_*.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * Atomic operations of all nodes on the same bytes take effect one after the other, each once. A
 * read or write at the same time may see, or leave, some of the bytes only. After EHOSTDOWN,
 * EHOSTUNREACH, EIO, ESTALE and ETIMEDOUT it may have been done, or may yet be, and after an EFAULT
 * of writing @value it was. Until a write returns its bytes may be written more than once: what
 * atomic operations keep, such as a lock, is to be set and freed by them alone.
 * EACCES, EBADF, EHOSTDOWN, EHOSTUNREACH, EINVAL, EIO, ENOMEM, ERANGE, ESTALE, ETIMEDOUT.
 */
struct kite_atomic {
	__u64 handle;
	__u64 offset;
	__u64 operand;
	__u64 expected;
	__u64 value;
	__u32 operation;
	__u32 timeout_ms;
};

/*
 * Most bytes of data of a call, a message or a reply that travel in one piece. More go by a region
 * that the kernel makes at the caller's node for the call, and then keeps for the session's next.
 */
#define KITE_DATA_INLINE 8128

/* Most bytes of data of a call, a message or a reply. */
#define KITE_DATA_MAX (1U << 30)

/* Most handles by which one region is served. */
#define KITE_SERVERS_MAX 1024

/**
 * struct kite_serve - makes the session a server of a region, which others can call.
 * @handle: in: the handle, with KITE_MASTER, of a region that this node owns.
 * @ring_size: in: bytes of the ring that each node gets whose programs call, a power of two from
 *	32 KiB to 4 MiB, or 0 for 64 KiB. That of the first server counts for all.
 * @data_max: in: most bytes of data of a call or message, KITE_DATA_INLINE to KITE_DATA_MAX, or 0
 *	for the former. That of the first server counts for all. Who calls with more sees EMSGSIZE.
 *
 * Whoever has the region mapped with KITE_WRITE can call its servers. These may be many, threads
 * and sessions; each call goes to one of them, and callers of different nodes take turns. While
 * calls wait, poll() says POLLIN to all of them. The session serves until the handle is given back
 * or the session is closed; those who wait for its answers then see ECONNRESET, and after the last
 * server all who call. The first server pays for the rings, until the last has ended. Memory and
 * name of the region stay what they are.
 * EACCES, EBADF, EBUSY (by this handle, or KITE_SERVERS_MAX others), EHOSTDOWN, EHOSTUNREACH,
 * EINVAL, ENOMEM, EREMOTE, ESTALE.
 */
struct kite_serve {
	__u64 handle;
	__u32 ring_size;
	__u32 data_max;
};

/*
 * No reply is wanted: the request returns when the message is at the server's node, or, with more
 * than KITE_DATA_INLINE bytes of data, when a server has it.
 */
#define KITE_CALL_ONEWAY 1

/**
 * struct kite_call - calls a server of a region and waits for the reply, or sends it a message.
 * @handle: in: the handle, with KITE_WRITE.
 * @addr: in: the data of the call.
 * @len: in: bytes of it, at most KITE_DATA_MAX.
 * @reply: in: where the data of the reply go.
 * @reply_len: in: room there, which the server is held to; out: bytes of the reply. The node sets
 *	as much memory aside if it is more than KITE_DATA_INLINE.
 * @function: in: number for the server.
 * @flags: in: 0 or KITE_CALL_ONEWAY, which goes with a @reply_len of 0.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * A call is made once at most. After ECONNRESET, EHOSTDOWN, EIO and ETIMEDOUT it may have been
 * made, or may yet be, and after an EFAULT of writing the reply, or an ENOMEM of a long one, it may
 * have been. Messages of one thread come in their order. A message of at most KITE_DATA_INLINE
 * bytes that no server took before the last of them ended is lost.
 * EACCES, EBADF, ECONNREFUSED, ECONNRESET, EHOSTDOWN, EHOSTUNREACH, EINVAL, EIO, EMSGSIZE, ENOMEM,
 * ESTALE, ETIMEDOUT (also while the server's ring is full).
 */
struct kite_call {
	__u64 handle;
	__u64 addr;
	__u64 len;
	__u64 reply;
	__u64 reply_len;
	__u32 function;
	__u32 flags;
	__u32 timeout_ms;
	__u32 reserved;
};

/* Waits for nothing: EAGAIN if no call is there, also if poll() said that one was. */
#define KITE_RECEIVE_NOWAIT 1

/**
 * struct kite_receive - waits for a call or message.
 * @handle: in: the handle of a region that the session serves by it.
 * @addr: in: where the data go.
 * @len: in: room there; out: bytes of data.
 * @call: out: number to reply to, or 0 for a message.
 * @function: out: as the caller said.
 * @node: out: node of the caller.
 * @uid: out: effective user of the caller.
 * @flags: in: 0 or KITE_RECEIVE_NOWAIT.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * After EMSGSIZE the call waits for a server with more room; there is none that needs more than
 * the @data_max of struct kite_serve. Data of more than KITE_DATA_INLINE bytes are read from the
 * caller's node, which may take longer than the deadline, also with KITE_RECEIVE_NOWAIT; for that
 * time they count against the memory lock limit. If the session ends before it has replied, its
 * caller sees ECONNRESET.
 * EACCES, EAGAIN, EBADF, EHOSTDOWN, EINTR, EINVAL, EMSGSIZE, ENOMEM, EOPNOTSUPP, ESTALE,
 * ETIMEDOUT.
 */
struct kite_receive {
	__u64 handle;
	__u64 addr;
	__u64 len;
	__u64 call;
	__u32 function;
	__u32 node;
	__u32 uid;
	__u32 flags;
	__u32 timeout_ms;
	__u32 reserved;
};

/* There will be no answer: the caller sees ECONNRESET. */
#define KITE_REPLY_ABORT 1

/**
 * struct kite_reply - answers a call.
 * @call: in: its number.
 * @addr: in: the data of the reply.
 * @len: in: bytes of it, at most KITE_DATA_MAX and the room that the caller has.
 * @flags: in: 0 or KITE_REPLY_ABORT, which goes with a @len of 0.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * After EFAULT, EINVAL, EMSGSIZE and ENOMEM the call can still be answered, after any other error
 * it cannot. That the caller waits no more, or is gone with its node, is no error.
 * EBADF (also while another thread answers it), EHOSTUNREACH, EINVAL, EIO, EMSGSIZE, ETIMEDOUT.
 */
struct kite_reply {
	__u64 call;
	__u64 addr;
	__u64 len;
	__u32 flags;
	__u32 timeout_ms;
};

/**
 * struct kite_reply_receive - answers a call and waits for the next, in one request.
 * @reply: in: the answer; none if its @call is 0. out: @call is 0.
 * @receive: in, out: see there.
 *
 * As KITE_IOC_REPLY, and if that succeeds KITE_IOC_RECEIVE. After EINTR the call was answered, and
 * after any other error it was if KITE_IOC_REPLY says EBADF.
 */
struct kite_reply_receive {
	struct kite_reply reply;
	struct kite_receive receive;
};

/* How to take a lock. */
#define KITE_LOCK_SHARED 1 /* with others that share it; needs KITE_READ instead of KITE_WRITE */
#define KITE_LOCK_TRY 2 /* waits for nobody: EAGAIN if others have it, or wait for it */

/* As if the holder had died with the lock: the next is told. */
#define KITE_UNLOCK_OWNER_DIED 1

/*
 * Most locks that are held or waited for, and barriers, of one region. Locks whose holders died and
 * that nobody took since count too, and barriers from their first use on.
 */
#define KITE_WAITERS_MAX 65536

/**
 * struct kite_lock - takes a lock of a region.
 * @handle: in: the handle, with KITE_WRITE, or KITE_READ to share.
 * @number: in: which lock. A region has one for each number; they are none of its memory.
 * @lock: out: number to unlock by, never 0.
 * @flags: in: KITE_LOCK_*.
 * @died: out: 1 if one that had it died, or gave back its handle, and did not unlock it, and nobody
 *	did since who took it, not to share, and was told so here. Else 0.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * Locks bind those alone who take them. All who want one stand in line for it, in the order in
 * which the region's node heard of them, and nobody overtakes. Who has taken it sees what was
 * written by those who had it before. It is given back by KITE_IOC_UNLOCK, or with the handle. A
 * lock of a node that died is free when the last node has heard of that, and all locks end when the
 * region's node dies.
 * EACCES, EAGAIN, EBADF, EHOSTDOWN, EHOSTUNREACH, EINTR, EINVAL, EIO, ENOMEM (also if the region
 * has KITE_WAITERS_MAX), ESTALE, ETIMEDOUT.
 */
struct kite_lock {
	__u64 handle;
	__u64 number;
	__u64 lock;
	__u32 flags;
	__u32 died;
	__u32 timeout_ms;
	__u32 reserved;
};

/**
 * struct kite_unlock - gives a lock back.
 * @lock: in: its number.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @flags: in: 0 or KITE_UNLOCK_OWNER_DIED.
 *
 * The next gets it when nothing that was written by the same handle can come late. If that, or the
 * answer of the region's node, takes longer, it is done in the background. EBADF; EINVAL; EACCES,
 * EHOSTDOWN and ESTALE: the lock ended before, with the rights, the region's node, this one or the
 * region.
 */
struct kite_unlock {
	__u64 lock;
	__u32 timeout_ms;
	__u32 flags;
};

/**
 * struct kite_barrier - waits until as many have come to a barrier of a region as are to come.
 * @handle: in: the handle, with KITE_WRITE.
 * @number: in: which barrier. A region has one for each number, besides its locks.
 * @generation: out: how often the barrier was passed, this time included.
 * @count: in: as how many, at least 1; all that wait at a time say the same, or EINVAL.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * Who sees an error has not come; but after EFAULT, EINTR, EIO and ETIMEDOUT the others may have
 * gone on as if he had. Then the next generation that he sees is higher by two. If the region's
 * node does not answer for half a second then, he may count as waiting until it does.
 * EACCES, EBADF, EHOSTDOWN, EHOSTUNREACH, EINTR, EINVAL, EIO, ENOMEM (also if the region has
 * KITE_WAITERS_MAX), ESTALE, ETIMEDOUT.
 */
struct kite_barrier {
	__u64 handle;
	__u64 number;
	__u64 generation;
	__u32 count;
	__u32 timeout_ms;
};

/* Most entries of a queue, and most bytes of memory that its requests use. */
#define KITE_QUEUE_ENTRIES_MAX 1024
#define KITE_QUEUE_MEMORY_MAX (1 << 30)

/* The kernel does not look at the submission queue until KITE_IOC_ENTER. */
#define KITE_QUEUE_NEED_WAKEUP 1

/**
 * struct kite_ring_header - the begin of the memory of a queue pair; each word has a cache line.
 * @sq_head: written by the kernel: submissions that it has taken.
 * @sq_tail: written by the process: submissions that it has added.
 * @cq_head: written by the process: completions that it has taken.
 * @cq_tail: written by the kernel: completions that it has added.
 * @flags: written by the kernel: KITE_QUEUE_NEED_WAKEUP.
 *
 * All counts go on modulo 2^32; entry n is at index n modulo the number of entries. Who adds
 * entries writes them before the tail (release), who takes them reads them after it (acquire).
 */
struct kite_ring_header {
	__u32 sq_head;
	__u32 reserved1[15];
	__u32 sq_tail;
	__u32 reserved2[15];
	__u32 cq_head;
	__u32 reserved3[15];
	__u32 cq_tail;
	__u32 reserved4[15];
	__u32 flags;
	__u32 reserved5[15];
};

/* Where the submissions begin in the memory of a queue pair; the completions follow them. */
#define KITE_QUEUE_SQ_OFFSET 4096

/**
 * struct kite_sqe - a request to be done while the process goes on.
 * @tag: says which it is, when it has completed.
 * @request: KITE_IOC_READ, WRITE, SET, COPY, ATOMIC, CALL, RECEIVE, REPLY, UNLOCK or PUSH.
 * @reserved: zero.
 * @body: the structure of that request, from the first byte on; the rest is ignored. What it would
 *	give out is in the completion. Pointers are to memory of the queue pair.
 *
 * Requests may be begun and done in any order: who needs one waits for completions. Until then the
 * RNIC may read the memory of a write, more than once, and write that of a read. A read that fails
 * may have changed some of it.
 *
 * If a KITE_IOC_REPLY fails, or is given up, nobody can answer the call any more, and its caller
 * sees ECONNRESET.
 *
 * Of KITE_IOC_RECEIVE the flags are zero. What it would give out is at @addr, struct kite_recv_header;
 * the data come behind that, where @len bytes have room.
 *
 * Of KITE_IOC_PUSH the body is not struct kite_push, but one struct kite_send_wr, whose @tag is the
 * number of the virtual queue pair. Its memory is what its keys say, and none of the queue pair's.
 * Those to one virtual queue pair are added to it in their order, each by itself: one that is
 * refused completes at once, and those after it are done. While KITE_VQP_DEPTH are under way the
 * next waits; ENOBUFS if they are all done, and wait to be popped. One whose turn, by the session's
 * priority and limits, does not come within the default deadline ends with ETIMEDOUT. What is added
 * completes here, in the order of the requests and in any case, KITE_WR_SIGNALED or not, and is
 * not popped.
 */
struct kite_sqe {
	__u64 tag;
	__u32 request;
	__u32 reserved;
	__u64 body[7];
};

/**
 * struct kite_cqe - what came of a submission.
 * @tag: as there.
 * @value: of KITE_IOC_ATOMIC what the word was, of KITE_IOC_CALL the bytes of the reply, of
 *	KITE_IOC_RECEIVE those of the data, else zero.
 * @error: an errno, as the request would have, or zero; of KITE_IOC_PUSH also as of KITE_IOC_POP.
 *	ENOTTY: it is none of those that are taken.
 * @reserved: zero.
 */
struct kite_cqe {
	__u64 tag;
	__u64 value;
	__u32 error;
	__u32 reserved;
};

/**
 * struct kite_recv_header - what a KITE_IOC_RECEIVE by a queue pair has received.
 * @call: number to reply to, or 0 for a message.
 * @len: bytes of data, which come behind this.
 * @function: as the caller said.
 * @node: node of the caller.
 * @uid: effective user of the caller.
 * @reserved: zero.
 */
struct kite_recv_header {
	__u64 call;
	__u64 len;
	__u32 function;
	__u32 node;
	__u32 uid;
	__u32 reserved;
};

/* Most queue pairs of a session. */
#define KITE_QUEUES_MAX 16

/**
 * struct kite_create_queue - makes a queue pair, by which requests are made without system calls.
 * @addr: in: the memory that requests by it use, instead of any of the process.
 * @len: in: bytes of it, at most KITE_QUEUE_MEMORY_MAX.
 * @entries: in: of each of its two queues, a power of two, at most KITE_QUEUE_ENTRIES_MAX.
 * @reserved: zero.
 * @queue: out: number of the queue pair in the session.
 * @offset: out: where to mmap() the queue pair in the session, MAP_SHARED.
 * @size: out: bytes to mmap(): struct kite_ring_header, at KITE_QUEUE_SQ_OFFSET the submission
 *	queue, and after its entries the completion queue.
 *
 * The memory is pinned and counts against RLIMIT_MEMLOCK, of the process and of all of the user's
 * together, until KITE_IOC_DESTROY_QUEUE or the end of the session, which does not end while something
 * of it is mapped. The kernel acts for the user, and accounts memory to the cgroup, that made this
 * request. It takes submissions while it looks for them, for a while after the last, then says
 * KITE_QUEUE_NEED_WAKEUP: who has added one has to check that (after a full memory barrier), and wake
 * it by KITE_IOC_ENTER. It takes no more than there is room for completions: who has made some for
 * what was added before has to check as well. While there is one, poll() says POLLIN. A child of
 * the process does not get the queues. After the RNIC is gone nothing is taken.
 * EBUSY (there are KITE_QUEUES_MAX), EFAULT, EINTR, EINVAL, ENOMEM (also over RLIMIT_MEMLOCK).
 */
struct kite_create_queue {
	__u64 addr;
	__u64 len;
	__u32 entries;
	__u32 reserved;
	__u64 queue;
	__u64 offset;
	__u64 size;
};

/**
 * struct kite_destroy_queue - ends a queue pair.
 * @queue: in: its number.
 *
 * What was posted to the RNIC is waited for. Requests that wait for another node or user go on,
 * and may still use the memory, which stays pinned for as long, and so do those that were added to
 * virtual queue pairs. The mapping stays, but means nothing. EBADF.
 */
struct kite_destroy_queue {
	__u64 queue;
};

/**
 * struct kite_enter - has the kernel look at a queue pair, and waits for completions.
 * @queue: in: its number.
 * @want: in: how many to wait for, at most as many as the queue has entries.
 * @ready: out: how many there are, not counting those that @cq_head says were taken.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * EBADF, EINTR, EINVAL, ENODEV, ETIMEDOUT.
 */
struct kite_enter {
	__u64 queue;
	__u32 want;
	__u32 ready;
	__u32 timeout_ms;
	__u32 reserved;
};

/**
 * struct kite_cancel - gives up what was submitted.
 * @queue: in: number of a queue pair.
 * @tag: in: of a submission that the kernel has taken, but not begun, or that waits for a reply.
 *
 * It completes with ECANCELED. A call may have been made, or may yet be. Of several with the same
 * tag one is given up. EBADF; ENOENT: there is none, as it has completed, was not taken, or is
 * just being done.
 */
struct kite_cancel {
	__u64 queue;
	__u64 tag;
};

/* Priorities. */
#define KITE_PRIORITY_HIGH 0
#define KITE_PRIORITY_LOW 1

/**
 * struct kite_priority - sets the priority of the session's requests, from now on.
 * @priority: in: KITE_PRIORITY_*; at first it is high.
 * @reserved: zero.
 *
 * How those of low priority give way to others is up to the policy, struct kite_qos. They never
 * starve, but may take long. EINVAL.
 */
struct kite_priority {
	__u32 priority;
	__u32 reserved;
};

/* How requests of low priority give way, at one RNIC. */
#define KITE_QOS_NONE 0 /* not at all */
/*
 * By their rate: while others go, they get what is left, and less while others take longer than
 * they could (SW-Pri). Costs nothing while no session has low priority.
 */
#define KITE_QOS_SW 1
/* By a queue pair of their own to each node, for reads and writes (HW-Sep) */
#define KITE_QOS_HW 2

/* @policy is to be set */
#define KITE_QOS_SET 1

/**
 * struct kite_qos - says, or sets, how requests of low priority give way at the session's RNIC.
 * @policy: out, or in with KITE_QOS_SET: KITE_QOS_*; at first KITE_QOS_SW.
 * @flags: in: 0 or KITE_QOS_SET.
 * @rate: out: bytes per second that those of low priority may have now, at 256 more for each
 *	request; 0 is any.
 * @sessions: out: sessions of low priority.
 * @reserved: zero.
 *
 * EINVAL; EPERM: only with CAP_NET_ADMIN it is set.
 */
struct kite_qos {
	__u32 policy;
	__u32 flags;
	__u64 rate;
	__u32 sessions;
	__u32 reserved;
};

/* Most limits at one RNIC. */
#define KITE_LIMITS_MAX 1024

/* Whom a limit is for. */
#define KITE_LIMIT_USER 1 /* a user, by number */
/* all processes in a cgroup and those below it, by its number in the unified hierarchy */
#define KITE_LIMIT_CGROUP 2

/**
 * struct kite_limit - limits what the sessions of somebody may have go through the session's RNIC.
 * @whom: in: KITE_LIMIT_*.
 * @reserved: zero.
 * @id: in: number of the user, or of the cgroup: the inode of its directory.
 * @bytes: in: per second, sent and received for reads and writes, messages and their relays, and
 *	those that other nodes are asked to set or copy; 0 is any.
 * @requests: in: per second, 0 is any; a read or write of more than 256 KiB counts as several,
 *	unless it goes by a queue pair; a request of a virtual queue pair counts as one, and
 *	those of one struct kite_push go together.
 * @bytes_used: zero; out in a listing: went since the limit was first set.
 * @requests_used: zero; out in a listing: likewise.
 * @waits: zero; out in a listing: looks at requests that had to wait.
 *
 * Both 0 lift the limit, if there is one. Who is over it waits, until the deadline of his request.
 * All limits that a process is under hold, as it was when it bound its session: its effective user,
 * and its cgroups. Reads and writes of this node's own memory are not limited, nor is the kernel.
 * Limits last until the RNIC or the module goes.
 * EINVAL, ENOSPC, EPERM: only with CAP_NET_ADMIN.
 */
struct kite_limit {
	__u32 whom;
	__u32 reserved;
	__u64 id;
	__u64 bytes;
	__u64 requests;
	__u64 bytes_used;
	__u64 requests_used;
	__u64 waits;
};

/**
 * struct kite_list_limits - lists the limits at the session's RNIC.
 * @limits: in: pointer to an array of struct kite_limit.
 * @count: in: room there; out: limits that there are (at most @count were written).
 * @reserved: zero.
 */
struct kite_list_limits {
	__u64 limits;
	__u32 count;
	__u32 reserved;
};

/**
 * struct kite_query_region - describes the region behind a handle.
 * @handle: in: the handle.
 * @len: out: bytes.
 * @chunk_size: out: bytes of each physically contiguous chunk but the last, a power of two.
 * @rights: out: rights of this handle.
 * @home: out: the node that owns the region.
 *
 * EACCES (the rights were revoked), EBADF, EHOSTDOWN (the owner died), ESTALE.
 */
struct kite_query_region {
	__u64 handle;
	__u64 len;
	__u64 chunk_size;
	__u32 rights;
	__u32 home;
};

/**
 * struct kite_region_entry - a named region in a listing.
 * @name: its name.
 * @len: bytes.
 * @owner: numeric user that owns it.
 * @others: rights of everybody else.
 * @mappers: handles that are open on it, in the whole cluster.
 * @home: the node that owns it.
 */
struct kite_region_entry {
	char name[KITE_NAME_SIZE];
	__u64 len;
	__u32 owner;
	__u32 others;
	__u32 mappers;
	__u32 home;
};

/**
 * struct kite_list_regions - lists the named regions that one node owns, a page at a time.
 * @node: in: the node, or KITE_NODE_SELF.
 * @count: in: room at @entries, at least 1; out: entries written. 0 ends the listing.
 * @cursor: in: 0 to begin, then as returned; out: where to go on.
 * @entries: in: pointer to an array of struct kite_region_entry.
 *
 * EHOSTDOWN, EHOSTUNREACH, EINVAL, ETIMEDOUT.
 */
struct kite_list_regions {
	__u32 node;
	__u32 count;
	__u64 cursor;
	__u64 entries;
};

/**
 * struct kite_address - where a node's control queue pair (UD) is reached on the fabric.
 * @gid: its GID.
 * @qpn: number of the queue pair.
 * @lid: LID, or 0 on Ethernet.
 * @link_layer: 1 InfiniBand, 2 Ethernet.
 * @reserved: zero.
 * @mtu: largest path MTU in bytes.
 * @reserved2: zero.
 */
struct kite_address {
	__u8 gid[16];
	__u32 qpn;
	__u16 lid;
	__u8 link_layer;
	__u8 reserved;
	__u32 mtu;
	__u32 reserved2;
};

/**
 * struct kite_member - a node of a view.
 * @node: its number.
 * @reserved: zero.
 * @incarnation: differs each time the node joins, so that its former life is not mistaken for it.
 * @address: how to reach it.
 */
struct kite_member {
	__u32 node;
	__u32 reserved;
	__u64 incarnation;
	struct kite_address address;
};

/**
 * struct kite_get_view - the view this node acts on.
 * @epoch: out: number of the view, 0 when there is none.
 * @self: out: number of this node, 0 when there is no view.
 * @count: in: room at @members; out: members of the view (at most @count were written).
 * @members: in: pointer to an array of struct kite_member.
 *
 * Never EHOSTUNREACH: no view is an answer too.
 */
struct kite_get_view {
	__u64 epoch;
	__u32 self;
	__u32 count;
	__u64 members;
};

/**
 * struct kite_query_rnic - describes an RNIC that kite runs on.
 * @index: in: 0, 1, … in order of arrival; ENOENT past the last. Needs no KITE_IOC_BIND.
 * @active: out: 1 if its port is active.
 * @name: out: its name.
 * @address: out: where this node is reached through it. The queue pair stays the same for as long
 *	as the RNIC is there.
 * @dynamic: out: 1 if it has dynamically connected transport, for virtual queue pairs.
 * @reserved: out: zero.
 *
 * ENODEV if it goes this moment.
 */
struct kite_query_rnic {
	__u32 index;
	__u32 active;
	char name[KITE_RNIC_NAME_SIZE];
	struct kite_address address;
	__u32 dynamic;
	__u32 reserved;
};

/**
 * struct kite_stats - counters of the RNIC since it appeared, and gauges (marked so).
 *
 * Counters never go back. Bytes are payload. An operation is one read, write, set, copy, atomic
 * request or call, one lock taken or barrier passed.
 */
struct kite_stats {
	__u64 reads;
	__u64 read_bytes;
	__u64 writes;
	__u64 write_bytes;
	__u64 fills;
	__u64 fill_bytes;
	__u64 copies;
	__u64 copy_bytes; /* what came from or went to this node was read and written too */
	__u64 migrations; /* regions of this node that were moved */
	__u64 migrated_bytes; /* also of moves that failed after that */
	__u64 atomics;
	__u64 rpcs; /* calls replied to, and messages sent */
	__u64 rpcs_served; /* calls and messages that servers took */
	__u64 locks; /* locks taken */
	__u64 barriers; /* barriers passed */
	__u64 lock_waits; /* waits for a lock or at a barrier */
	__u64 local_bytes; /* the part of the bytes above that stayed in this node */
	__u64 errors; /* operations that failed */
	__u64 sqes; /* requests taken from submission queues */
	__u64 retries; /* operations replayed after a queue pair failed */
	__u64 work_requests; /* posted to send queues */
	__u64 blocked_waits; /* waits that outlasted the spin and slept */
	__u64 slot_waits; /* waits for a free slot */
	__u64 credit_waits; /* waits for room in a send queue */
	__u64 ring_waits; /* waits for room in a ring for calls or replies */
	__u64 throttled; /* looks at requests that their priority or a limit held back */
	__u64 unmatched_completions; /* completions that matched no slot, and were dropped */
	__u64 ctrl_requests; /* control requests sent */
	__u64 ctrl_requests_served; /* control requests answered */
	__u64 malformed_messages; /* messages dropped for their form or their sender */
	__u64 duplicate_messages; /* copies of requests and messages that came before, dropped */
	__u64 qp_connects; /* queue pairs connected */
	__u64 qp_errors; /* queue pairs lost */
	__u64 qp_evictions; /* queue pairs given up because there were many and nobody used them */
	__u64 dci_errors; /* initiators of DC that failed, and are started anew */
	__u64 dc_replays; /* requests of virtual queue pairs that went again when one failed */
	__u64 vqp_requests; /* pushed to virtual queue pairs */
	__u64 vqp_rc_requests; /* those of them that went by connections */
	__u64 transport_switches; /* changes of virtual queue pairs from DC to a connection, or back */
	__u64 promotions; /* nodes that became worth a connection */
	__u64 vqp_messages_received; /* by virtual queue pairs */
	__u64 directory_hits; /* targets of DC that were known already */
	__u64 directory_reads; /* READs of the directory of targets */
	__u64 directory_misses; /* targets that it did not have, yet or any more */
	__u64 wakeups; /* times the poller thread was woken from sleep */
	__u64 lent_bytes; /* gauge: memory lent to other nodes through this RNIC */
	__u64 regions; /* gauge: regions that this node owns */
	__u64 open_handles; /* gauge: handles open on this node, and what long calls have */
	__u64 connected_qps; /* gauge: queue pairs that are connected */
	__u64 promoted_peers; /* gauge: nodes that virtual queue pairs reach by connections, not by DC */
	__u64 dcis; /* gauge: queue pairs by which all others are reached, by DC */
	__u64 inflight; /* gauge: work requests posted and not completed */
	__u64 sessions; /* gauge: bound sessions */
	__u64 io_queues; /* gauge: queue pairs of sessions */
};

/**
 * struct kite_parameters - the module parameters in effect, each limited to its range.
 * @conns_per_peer: RC queue pairs per peer.
 * @max_idle_conns: maximum idle RC queue pairs kept per RNIC.
 * @max_inflight: maximum operations in flight per RNIC.
 * @max_promoted: maximum peers that virtual queue pairs reach by RC.
 * @max_lent_mib: maximum memory lent to other nodes, in MiB; 0 is half of RAM.
 * @max_local_mib: maximum memory of this node in regions of its own users, in MiB; 0 is no limit.
 * @max_poll_us: maximum time that a waiter polls before it sleeps, in microseconds.
 * @default_timeout_ms: deadline of requests that set none, in milliseconds.
 *
 * All fields are output. Needs no KITE_IOC_BIND. Does not fail.
 */
struct kite_parameters {
	__u32 conns_per_peer;
	__u32 max_idle_conns;
	__u32 max_inflight;
	__u32 max_promoted;
	__u32 max_lent_mib;
	__u32 max_local_mib;
	__u32 max_poll_us;
	__u32 default_timeout_ms;
};

/* What KITE_IOC_GET_EVENT reports. */
/* @value is a handle whose region was freed, whose owner died, or whose rights were revoked */
#define KITE_EVENT_STALE 1
/*
 * To the daemon: @value is a node that does not answer. Reported again, at most once a second, for
 * as long as it is tried in vain.
 */
#define KITE_EVENT_PEER_UNREACHABLE 2

/**
 * struct kite_event - takes the next event of the session; poll() says POLLIN while there is one,
 * and POLLERR and POLLHUP once the RNIC is gone.
 * @kind: out: KITE_EVENT_*.
 * @reserved: out: zero.
 * @value: out: see there.
 *
 * EAGAIN (none now), ENODEV (none, and the RNIC is gone: there will be no more).
 */
struct kite_event {
	__u32 kind;
	__u32 reserved;
	__u64 value;
};

/**
 * struct kite_join - makes the session the daemon of its RNIC.
 * @node: in: number of this node, 1 … KITE_NODE_MAX.
 * @reserved: zero.
 * @incarnation: in: of this life of the node, not 0.
 * @secret: in: what the kernels of the cluster know each other by.
 *
 * Only with CAP_NET_ADMIN. Closing the last descriptor of the session leaves the cluster: every
 * mapping ends, regions that this node owns are gone, and another session may join at once, with
 * epochs from 1 again. A duplicate of the descriptor continues the session in another process.
 * EBUSY (the RNIC has a daemon), EINVAL, EPERM.
 */
struct kite_join {
	__u32 node;
	__u32 reserved;
	__u64 incarnation;
	__u8 secret[16];
};

/**
 * struct kite_set_view - sets the nodes of the cluster, this one included.
 * @epoch: in: higher than that of the view before.
 * @count: in: number of @members, 1 … KITE_NODES_MAX.
 * @reserved: zero.
 * @members: in: pointer to an array of struct kite_member, in ascending order of their numbers.
 *
 * Returns when nodes that are gone can no longer reach this node's memory.
 * EINVAL (the epoch does not rise, the members are not in order, this node in its present life is
 * not one of them, or the RNIC has not the address given for it), ENOMEM, EPERM (not the daemon).
 */
struct kite_set_view {
	__u64 epoch;
	__u32 count;
	__u32 reserved;
	__u64 members;
};

#define KITE_IOC_MAGIC 0xBC

#define KITE_IOC_BIND _IOWR(KITE_IOC_MAGIC, 0x00, struct kite_bind)
#define KITE_IOC_ALLOC _IOWR(KITE_IOC_MAGIC, 0x01, struct kite_alloc)
#define KITE_IOC_MAP _IOWR(KITE_IOC_MAGIC, 0x02, struct kite_map)
#define KITE_IOC_UNMAP _IOW(KITE_IOC_MAGIC, 0x03, struct kite_handle)
#define KITE_IOC_FREE _IOW(KITE_IOC_MAGIC, 0x04, struct kite_handle)
#define KITE_IOC_READ _IOW(KITE_IOC_MAGIC, 0x05, struct kite_rw)
#define KITE_IOC_WRITE _IOW(KITE_IOC_MAGIC, 0x06, struct kite_rw)
#define KITE_IOC_QUERY_REGION _IOWR(KITE_IOC_MAGIC, 0x07, struct kite_query_region)
#define KITE_IOC_LIST_REGIONS _IOWR(KITE_IOC_MAGIC, 0x08, struct kite_list_regions)
#define KITE_IOC_GET_EVENT _IOR(KITE_IOC_MAGIC, 0x09, struct kite_event)
#define KITE_IOC_ATOMIC _IOWR(KITE_IOC_MAGIC, 0x0a, struct kite_atomic)
#define KITE_IOC_SERVE _IOW(KITE_IOC_MAGIC, 0x0b, struct kite_serve)
#define KITE_IOC_CALL _IOWR(KITE_IOC_MAGIC, 0x0c, struct kite_call)
#define KITE_IOC_RECEIVE _IOWR(KITE_IOC_MAGIC, 0x0d, struct kite_receive)
#define KITE_IOC_REPLY _IOW(KITE_IOC_MAGIC, 0x0e, struct kite_reply)
#define KITE_IOC_REPLY_RECEIVE _IOWR(KITE_IOC_MAGIC, 0x0f, struct kite_reply_receive)

#define KITE_IOC_LOCK _IOWR(KITE_IOC_MAGIC, 0x10, struct kite_lock)
#define KITE_IOC_UNLOCK _IOW(KITE_IOC_MAGIC, 0x11, struct kite_unlock)
#define KITE_IOC_BARRIER _IOWR(KITE_IOC_MAGIC, 0x12, struct kite_barrier)
#define KITE_IOC_FILL _IOW(KITE_IOC_MAGIC, 0x13, struct kite_fill)
#define KITE_IOC_COPY _IOW(KITE_IOC_MAGIC, 0x14, struct kite_copy)
#define KITE_IOC_GRANT _IOW(KITE_IOC_MAGIC, 0x15, struct kite_grant)
#define KITE_IOC_CREATE_QUEUE _IOWR(KITE_IOC_MAGIC, 0x16, struct kite_create_queue)
#define KITE_IOC_ENTER _IOWR(KITE_IOC_MAGIC, 0x17, struct kite_enter)
#define KITE_IOC_DESTROY_QUEUE _IOW(KITE_IOC_MAGIC, 0x18, struct kite_destroy_queue)
#define KITE_IOC_CANCEL _IOW(KITE_IOC_MAGIC, 0x19, struct kite_cancel)
#define KITE_IOC_READV _IOW(KITE_IOC_MAGIC, 0x1a, struct kite_rwv)
#define KITE_IOC_WRITEV _IOW(KITE_IOC_MAGIC, 0x1b, struct kite_rwv)
#define KITE_IOC_REGISTER _IOWR(KITE_IOC_MAGIC, 0x1c, struct kite_register)

#define KITE_IOC_SET_PRIORITY _IOW(KITE_IOC_MAGIC, 0x1d, struct kite_priority)
#define KITE_IOC_MIGRATE _IOW(KITE_IOC_MAGIC, 0x1e, struct kite_migrate)

#define KITE_IOC_GET_VIEW _IOWR(KITE_IOC_MAGIC, 0x20, struct kite_get_view)
#define KITE_IOC_QUERY_RNIC _IOWR(KITE_IOC_MAGIC, 0x21, struct kite_query_rnic)
#define KITE_IOC_GET_STATS _IOR(KITE_IOC_MAGIC, 0x22, struct kite_stats)

#define KITE_IOC_QOS _IOWR(KITE_IOC_MAGIC, 0x23, struct kite_qos)
#define KITE_IOC_SET_LIMIT _IOW(KITE_IOC_MAGIC, 0x24, struct kite_limit)
#define KITE_IOC_LIST_LIMITS _IOWR(KITE_IOC_MAGIC, 0x25, struct kite_list_limits)
#define KITE_IOC_GET_PARAMETERS _IOR(KITE_IOC_MAGIC, 0x26, struct kite_parameters)

/*
 * Virtual queue pairs: verbs to one node, without a connection to wait for if the RNICs of both
 * have dynamically connected transport (mlx5), or else over one that all share (KRCORE).
 */

/* Most pieces of memory that all processes of a node have registered for them on an RNIC. */
#define KITE_MRS_MAX 2048

/* Longest piece of memory. */
#define KITE_MR_SIZE_MAX (256 << 20)

/* Requests of a virtual queue pair that are not popped, and of one push. */
#define KITE_VQP_DEPTH 256
#define KITE_PUSH_MAX 32

/**
 * struct kite_reg_mr - registers memory of the process for virtual queue pairs.
 * @addr: in: the memory, which the process may write.
 * @len: in: bytes, 1 … KITE_MR_SIZE_MAX.
 * @others: in: what other users than the owner (the caller's effective user) and root may do
 *	who have the key: KITE_READ, KITE_WRITE. Both together allow atomic operations.
 * @key: out: names the memory in requests, also in those of processes on other nodes.
 *
 * Its pages are pinned, and count against RLIMIT_MEMLOCK, until KITE_IOC_DEREG_MR or the end of
 * the session, and up to 2.5 s longer: until no request of another node can reach them. A
 * request that the limit leaves no room for waits for them, and so does one of a user that has
 * an eighth of RAM or 512 pieces of memory pinned in this way. After a fork they are the
 * parent's. EFAULT, EHOSTUNREACH, EINTR, EINVAL, ENOMEM (the limit is too low, there is no
 * memory, or there are KITE_MRS_MAX), ENXIO (longer than the RNIC has keys to, if it is not
 * mlx5).
 */
struct kite_reg_mr {
	__u64 addr;
	__u64 len;
	__u32 others;
	__u32 key;
};

/**
 * struct kite_dereg_mr - takes back memory that this session registered.
 * @key: in: its key.
 * @reserved: zero.
 *
 * EBADF.
 */
struct kite_dereg_mr {
	__u32 key;
	__u32 reserved;
};

/**
 * struct kite_connect - makes a virtual queue pair to a node.
 * @node: in: a node of the view, without DC not this one.
 * @port: in: where somebody listens there who is to get messages, or 0 for none.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 * @vqp: out: its number.
 *
 * The node hears nothing of it before the first message. EBUSY (the session has KITE_VQPS_MAX),
 * EHOSTDOWN, EHOSTUNREACH, EINTR, EINVAL (this node, without DC), ENOMEM, ETIMEDOUT.
 */
struct kite_connect {
	__u32 node;
	__u32 port;
	__u32 timeout_ms;
	__u32 reserved;
	__u64 vqp;
};

/* Virtual queue pairs of a session, and ports at which it listens. */
#define KITE_VQPS_MAX 64

/**
 * struct kite_close_vqp - ends a virtual queue pair, or listening at a port.
 * @vqp: in: its number, or that of who listens.
 *
 * What the RNIC has begun ends first, and what came by a queue pair completes with ECANCELED. The
 * other end, if there is one, sees ECONNRESET. EBADF.
 */
struct kite_close_vqp {
	__u64 vqp;
};

/**
 * struct kite_listen - listens at a port for those who connect to it.
 * @port: in: not 0; those of a node are for whoever comes first.
 * @reserved: zero.
 * @listener: out: a number, for KITE_IOC_ACCEPT, and KITE_IOC_CLOSE_VQP when it is over.
 *
 * Whoever connects there and is not accepted yet has up to KITE_RECV_CREDITS messages kept.
 * EADDRINUSE, EBUSY (the session has KITE_VQPS_MAX), EHOSTUNREACH, EINVAL, ENOMEM.
 */
struct kite_listen {
	__u32 port;
	__u32 reserved;
	__u64 listener;
};

/* Messages that are kept for who has not received them; more wait at their sender. */
#define KITE_RECV_CREDITS 32

/**
 * struct kite_accept - takes a virtual queue pair whose other end has sent a message to a port.
 * @listener: in: who listens there.
 * @vqp: out: its number, in this session.
 * @node: out: that of the other end.
 * @uid: out: the user who has the other end.
 * @timeout_ms: in: how long to wait for one, or 0 not to.
 * @reserved: zero.
 *
 * EAGAIN (there is none), EBADF (also when listening ends meanwhile), EBUSY (the session has
 * KITE_VQPS_MAX), EINTR, ENOMEM, ETIMEDOUT.
 */
struct kite_accept {
	__u64 listener;
	__u64 vqp;
	__u32 node;
	__u32 uid;
	__u32 timeout_ms;
	__u32 reserved;
};

#define KITE_WR_READ 1 /* from the remote memory to the local */
#define KITE_WR_WRITE 2
#define KITE_WR_COMPARE_SWAP 3 /* of 8 bytes; what was there goes to the local memory */
#define KITE_WR_FETCH_ADD 4
#define KITE_WR_SEND 5 /* a message for the other end */

#define KITE_WR_SIGNALED (1 << 0) /* it has a completion not only when it fails */

#define KITE_WR_FENCE (1 << 1) /* reads and atomic operations before it end first */

/* @operand is said with a SEND, or in a message after a WRITE. */
#define KITE_WR_WITH_IMM (1 << 2)

/* Of a message that was received: its bytes were written before. */
#define KITE_RECV_PLACED (1 << 3)

/**
 * struct kite_send_wr - a request of a virtual queue pair.
 * @tag: in: its completion has it; or, in a struct kite_sqe, which has a tag of its own, the
 *	number of the virtual queue pair.
 * @addr: in: local memory.
 * @remote_addr: in: remote memory, by the address that its owner has; of atomic operations a
 *	multiple of 8, of SEND zero.
 * @operand: in: what to add, or to swap in, or 32 bits of immediate data; else zero.
 * @expected: in: what to compare with; else zero.
 * @len: in: bytes, at least 1; 8 for atomic operations.
 * @key: in: of the local memory, of this session.
 * @remote_key: in: of the remote memory; of SEND zero.
 * @op: in: KITE_VQP_….
 * @flags: in: any of KITE_WR_SIGNALED, KITE_WR_FENCE and KITE_WR_WITH_IMM.
 *
 * A SEND, or a WRITE with immediate data, is done when the message is at the other node and a
 * process has accepted the queue pair; one of more than KITE_SEND_MAX bytes when it was received,
 * and until then its memory is read. If a message fails, so does all that is pushed after it.
 */
struct kite_send_wr {
	__u64 tag;
	__u64 addr;
	__u64 remote_addr;
	__u64 operand;
	__u64 expected;
	__u32 len;
	__u32 key;
	__u32 remote_key;
	__u16 op;
	__u16 flags;
};

/* Longer messages are fetched by who receives them; without DC all of more than 956 bytes are. */
#define KITE_SEND_MAX 4028

/**
 * struct kite_push - adds requests to a virtual queue pair: all of them, or none.
 * @vqp: in: its number.
 * @works: in: pointer to @count struct kite_send_wr.
 * @count: in: 1 … KITE_PUSH_MAX.
 * @timeout_ms: in: deadline in milliseconds for finding out what a key means, and for the session's
 *	turn by its priority and limits, or 0 for the default of the module.
 *
 * They are done in their order, but a write may overtake reads and atomic operations before it
 * unless it is fenced, as with verbs. When what carries them fails, and it is not known how far it
 * came, reads and writes are done again: a write, perhaps, after others have written there. Each is
 * checked before any is posted: what is refused here harms nobody, and leaves the virtual queue
 * pair as it was.
 * EACCES (the key allows it not), EBADF (no such @vqp, or @key of this session), ECONNREFUSED,
 * ECONNRESET, EHOSTDOWN, EHOSTUNREACH, EINTR, EINVAL (also for a message by one that is to no
 * port), ENOBUFS (more than KITE_VQP_DEPTH would not be popped, or not be done that came by queue
 * pairs), ENOENT (no such @remote_key), ERANGE, ETIMEDOUT.
 */
struct kite_push {
	__u64 vqp;
	__u64 works;
	__u32 count;
	__u32 timeout_ms;
};

/**
 * struct kite_pop - takes completions of a virtual queue pair, in the order of their requests.
 * @vqp: in: its number.
 * @completions: in: pointer to @count struct kite_cqe, which get the tag, and the error:
 *	0, ETIMEDOUT if the node did not answer, EIO if it or the RNIC refused, EACCES, ENOENT and
 *	ERANGE if the remote memory changed while the request waited, ECANCELED if a request before
 *	it failed, or ECONNREFUSED, ECONNRESET, EHOSTDOWN and EHOSTUNREACH as below. An atomic
 *	operation that failed may have been done; where the kernel of the node is asked for it, it
 *	may yet be, also after the queue pair was closed, and there are ENXIO (that one's RNIC has
 *	them, but not for ours) and ENOMEM besides.
 * @count: in: how many there is room for, at least 1; out: how many there were.
 * @timeout_ms: in: how long to wait for one, or 0 not to.
 *
 * EBADF, EAGAIN (there is none), EINTR, EINVAL, ETIMEDOUT. When all were taken, and there will be
 * no more: ECONNREFUSED, ECONNRESET (also after a message that failed), EHOSTDOWN, EHOSTUNREACH.
 */
struct kite_pop {
	__u64 vqp;
	__u64 completions;
	__u32 count;
	__u32 timeout_ms;
};

/**
 * struct kite_pop_message - takes the first message of a virtual queue pair.
 * @vqp: in: its number.
 * @addr: in: where to.
 * @key: in: of that memory, of this session.
 * @len: in: room there; out: bytes of the message.
 * @immediate: out: immediate data, if @flags has KITE_WR_WITH_IMM.
 * @flags: out: any of KITE_WR_WITH_IMM, and KITE_RECV_PLACED: the bytes are elsewhere.
 * @timeout_ms: in: how long to wait for one, or 0 not to.
 * @reserved: zero.
 *
 * Messages of one sender come in their order, and before it is said that the other end has ended.
 * EAGAIN (there is none), EBADF, ECONNREFUSED, ECONNRESET, EHOSTDOWN, EHOSTUNREACH, EINTR, EINVAL
 * (it is to no port), EMSGSIZE (longer than @len: it is still the first), ERANGE, ETIMEDOUT.
 */
struct kite_pop_message {
	__u64 vqp;
	__u64 addr;
	__u32 key;
	__u32 len;
	__u32 immediate;
	__u32 flags;
	__u32 timeout_ms;
	__u32 reserved;
};

/* Of the account of a virtual queue pair. */
#define KITE_VQP_STATE_RC (1 << 0) /* its requests go by a connection */
#define KITE_VQP_STATE_CLOSED (1 << 1) /* nothing more can be pushed to it */
#define KITE_VQP_STATE_READABLE (1 << 2) /* a message is there to be received */

/**
 * struct kite_vqp_info - a virtual queue pair of a process, and what it has done.
 * @node: out: the other node.
 * @port: out: the port there that it is to, or here that it came to; 0 for none.
 * @uid: out: whose it is.
 * @pid: out: number of the process that made or accepted it.
 * @flags: out: any of KITE_VQP_STATE_RC, KITE_VQP_STATE_CLOSED and KITE_VQP_STATE_READABLE.
 * @pending: out: requests of which nobody knows yet what became of them.
 * @requests: out: requests that were pushed.
 * @bytes: out: bytes of them.
 * @messages: out: messages that were received.
 */
struct kite_vqp_info {
	__u32 node;
	__u32 port;
	__u32 uid;
	__u32 pid;
	__u32 flags;
	__u32 pending;
	__u64 requests;
	__u64 bytes;
	__u64 messages;
};

/**
 * struct kite_list_vqps - lists the virtual queue pairs of the caller's user at the session's RNIC, to
 * root those of all.
 * @accounts: in: pointer to an array of struct kite_vqp_info.
 * @count: in: room there; out: those that there are (at most @count were written).
 * @reserved: zero.
 */
struct kite_list_vqps {
	__u64 accounts;
	__u32 count;
	__u32 reserved;
};

#define KITE_IOC_REG_MR _IOWR(KITE_IOC_MAGIC, 0x28, struct kite_reg_mr)
#define KITE_IOC_DEREG_MR _IOW(KITE_IOC_MAGIC, 0x29, struct kite_dereg_mr)
#define KITE_IOC_CONNECT _IOWR(KITE_IOC_MAGIC, 0x2a, struct kite_connect)
#define KITE_IOC_CLOSE_VQP _IOW(KITE_IOC_MAGIC, 0x2b, struct kite_close_vqp)
#define KITE_IOC_PUSH _IOW(KITE_IOC_MAGIC, 0x2c, struct kite_push)
#define KITE_IOC_POP _IOWR(KITE_IOC_MAGIC, 0x2d, struct kite_pop)
#define KITE_IOC_LISTEN _IOWR(KITE_IOC_MAGIC, 0x2e, struct kite_listen)
#define KITE_IOC_ACCEPT _IOWR(KITE_IOC_MAGIC, 0x2f, struct kite_accept)
#define KITE_IOC_POP_MESSAGE _IOWR(KITE_IOC_MAGIC, 0x30, struct kite_pop_message)
#define KITE_IOC_LIST_VQPS _IOWR(KITE_IOC_MAGIC, 0x31, struct kite_list_vqps)

#define KITE_IOC_JOIN _IOW(KITE_IOC_MAGIC, 0x40, struct kite_join)
#define KITE_IOC_SET_VIEW _IOW(KITE_IOC_MAGIC, 0x41, struct kite_set_view)

#endif /* _UAPI_KITE_H */
