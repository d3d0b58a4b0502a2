// SPDX-License-Identifier: GPL-2.0
/*
 * An RPC server in the kernel: a thread that replies to calls with their data, each byte inverted,
 * until the module is unloaded.
 *
 *	insmod kite_server.ko name=NAME
 *
 * With calls=N the module makes N calls itself while it is loaded.
 */
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/slab.h>

#include <kite.h>

static char *name = "inverter";
module_param(name, charp, 0444);
MODULE_PARM_DESC(name, "name of the served region");

static uint calls;
module_param(calls, uint, 0444);
MODULE_PARM_DESC(calls, "calls to make (default 0)");

/* Interval in which the thread checks whether it must stop. */
#define STOP_POLL_MS 100

static struct kite_session *session;
static struct task_struct *server;
static u64 handle;
static u8 *buf;

/* Maximum data of a call: twice the inline size, so that some calls use rendezvous. */
#define MAX_DATA_BYTES (2 * KITE_DATA_INLINE)

static void invert(u8 *data, size_t len)
{
	while (len--)
		data[len] = ~data[len];
}

static int serve(void *unused)
{
	struct kite_receive request;
	int err;

	while (!kthread_should_stop()) {
		err = kite_receive(session, handle, buf, MAX_DATA_BYTES, STOP_POLL_MS, &request);
		if (err || !request.call)
			continue;
		invert(buf, request.len);
		err = kite_reply(session, request.call, buf, request.len);
		if (err)
			pr_info("a call from node %u is not answered: %d\n", request.node, err);
	}
	return 0;
}

/* Calls the server by another session, as any other module would. */
static int call(u8 *data)
{
	struct kite_session *caller = kite_open(NULL);
	int err = PTR_ERR_OR_ZERO(caller);
	size_t len, sent_len;
	u64 caller_handle;
	uint i;

	if (err)
		return err;
	err = kite_map(caller, name, KITE_WRITE, &caller_handle, NULL);
	for (i = 0; i < calls && !err; i++) {
		sent_len = 61 * i % (MAX_DATA_BYTES + 1);
		len = MAX_DATA_BYTES;
		memset(data, i, MAX_DATA_BYTES);
		err = kite_call(caller, caller_handle, 0, data, sent_len, data, &len);
		if (!err && (len != sent_len || (len && data[len - 1] != (u8)~i)))
			err = -EBADMSG;
	}
	if (!err)
		err = kite_send(caller, caller_handle, 0, data, 1);
	kite_close(caller);
	return err;
}

static int call_all(void)
{
	u8 *data = kmalloc(MAX_DATA_BYTES, GFP_KERNEL);
	int err = data ? call(data) : -ENOMEM;

	kfree(data);
	return err;
}

static int start(void)
{
	int err = kite_alloc(session, name, 1, NULL, 0, KITE_WRITE, &handle);

	if (err)
		return err;
	err = kite_serve(session, handle, 0, MAX_DATA_BYTES);
	if (err)
		goto free;
	server = kthread_run(serve, NULL, "kite_server");
	err = PTR_ERR_OR_ZERO(server);
	if (err)
		goto free;
	err = calls ? call_all() : 0;
	if (!err)
		return 0;
	kthread_stop(server);
free:
	kite_free(session, handle);
	return err;
}

static int __init kite_server_init(void)
{
	int err;

	buf = kmalloc(MAX_DATA_BYTES, GFP_KERNEL);
	if (!buf)
		return -ENOMEM;
	session = kite_open(NULL);
	err = PTR_ERR_OR_ZERO(session);
	if (err)
		goto free;
	err = start();
	if (!err)
		return 0;
	kite_close(session);
free:
	kfree(buf);
	return err;
}
module_init(kite_server_init);

static void __exit kite_server_exit(void)
{
	kthread_stop(server);
	kite_free(session, handle);
	kite_close(session);
	kfree(buf);
}
module_exit(kite_server_exit);

MODULE_DESCRIPTION("Serves RPCs in the kernel");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
