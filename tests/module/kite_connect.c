// SPDX-License-Identifier: GPL-2.0
/*
 * Measures the time in which a user of verbs in the kernel connects to another node: creation of an
 * RC queue pair, exchange of its number and LID with the remote kernel, and the transition to RTS.
 * Endpoints exchange these over TCP, as programs do. TCP connection and device stay open.
 *
 *	insmod kite_connect.ko clients=8
 *	insmod kite_connect.ko clients=8 server=10.77.0.2 count=100
 *	cat /sys/module/kite_connect/parameters/median_ns
 *
 * The first is the server: it waits until all clients have closed their connections. The second
 * connects count times for each client, and leaves the results in its parameters. InfiniBand only.
 */
#include <linux/inet.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/net.h>
#include <linux/slab.h>
#include <linux/workqueue.h>
#include <net/sock.h>

#include <rdma/ib_verbs.h>

#include "common.h"
#include "qp.h"

static char *server;
module_param(server, charp, 0444);
MODULE_PARM_DESC(server, "IPv4 address of the server (default: be the server)");

static ushort port = 18515;
module_param(port, ushort, 0444);
MODULE_PARM_DESC(port, "TCP port of the server (default 18515)");

static uint clients = 1;
module_param(clients, uint, 0444);
MODULE_PARM_DESC(clients, "number of concurrent clients (default 1)");

static uint count = 100;
module_param(count, uint, 0444);
MODULE_PARM_DESC(count, "connections of each client, one after the other (default 100)");

static ulong median_ns;
module_param(median_ns, ulong, 0444);
MODULE_PARM_DESC(median_ns, "result: median time of a connection, in ns");

static ulong per_second;
module_param(per_second, ulong, 0444);
MODULE_PARM_DESC(per_second, "result: connections per second of all clients, each closed before its next");

/* Work requests in flight on a queue pair. */
#define MAX_SEND_WR 64

/* Attributes that the endpoints of a connection exchange. */
struct qp_info {
	u32 qp_num;
	u16 lid;
	u16 mtu;
};

/* One client, or the server side of one. */
struct endpoint {
	struct work_struct work;
	struct socket *socket;
	u64 *times;
	int err;
};

static struct ib_device *device;
static struct ib_port_attr port_attr;
static struct ib_pd *pd;
static struct ib_cq *cq;

/* Queue pairs. */

static int connect_qp(struct ib_qp *qp, const struct qp_info *remote)
{
	struct rdma_ah_attr path = { .type = RDMA_AH_ATTR_TYPE_IB };
	enum ib_mtu mtu = min_t(u16, port_attr.active_mtu, remote->mtu);

	rdma_ah_set_port_num(&path, PORT);
	rdma_ah_set_dlid(&path, remote->lid);
	return modify_to_init(qp) ?: modify_to_rtr(qp, remote->qp_num, mtu, &path) ?:
	       modify_to_rts(qp);
}

/* Exchange of attributes. */

static int send_qp_info(struct socket *socket, struct ib_qp *qp)
{
	struct qp_info local = { qp->qp_num, port_attr.lid, port_attr.active_mtu };
	struct kvec vec = { &local, sizeof(local) };
	struct msghdr message = {};
	int sent = kernel_sendmsg(socket, &message, &vec, 1, sizeof(local));

	return sent < 0 ? sent : sent == sizeof(local) ? 0 : -EPIPE;
}

/* Returns 1, or 0 if the peer has closed the connection. */
static int recv_qp_info(struct socket *socket, struct qp_info *remote)
{
	struct kvec vec = { remote, sizeof(*remote) };
	struct msghdr message = {};
	int received = kernel_recvmsg(socket, &message, &vec, 1, sizeof(*remote), MSG_WAITALL);

	return received <= 0 ? received : received == sizeof(*remote) ? 1 : -EPIPE;
}

/* Clients. */

static int connect_once(struct endpoint *endpoint, u64 *time)
{
	u64 start = ktime_get_ns();
	struct ib_qp *qp = create_rc_qp(pd, cq, MAX_SEND_WR);
	struct qp_info remote;
	int err;

	if (IS_ERR(qp))
		return PTR_ERR(qp);
	err = send_qp_info(endpoint->socket, qp);
	if (!err)
		err = recv_qp_info(endpoint->socket, &remote);
	/* The server does not close the connection before the client does. */
	err = err == 1 ? connect_qp(qp, &remote) : err ?: -EPIPE;
	*time = ktime_get_ns() - start;
	ib_destroy_qp(qp);
	return err;
}

static void connect_all(struct work_struct *work)
{
	struct endpoint *endpoint = container_of(work, struct endpoint, work);
	uint i;

	for (i = 0; i < count && !endpoint->err; i++)
		endpoint->err = connect_once(endpoint, &endpoint->times[i]);
}

static int connect_endpoint(struct endpoint *endpoint)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int err = sock_create_kern(&init_net, PF_INET, SOCK_STREAM, IPPROTO_TCP, &endpoint->socket);

	if (err)
		return err;
	if (!in4_pton(server, -1, (u8 *)&address.sin_addr, -1, NULL))
		return -EINVAL;
	tcp_sock_set_nodelay(endpoint->socket->sk);
	return kernel_connect(endpoint->socket, (struct sockaddr_unsized *)&address,
			      sizeof(address), 0);
}

/* Server. */

static void serve_one(struct work_struct *work)
{
	struct endpoint *endpoint = container_of(work, struct endpoint, work);
	struct ib_qp *qp = NULL;
	struct qp_info remote;

	while (!endpoint->err && (endpoint->err = recv_qp_info(endpoint->socket, &remote)) == 1) {
		if (qp)
			ib_destroy_qp(qp);
		qp = create_rc_qp(pd, cq, MAX_SEND_WR);
		if (IS_ERR(qp)) {
			endpoint->err = PTR_ERR(qp);
			return;
		}
		endpoint->err = connect_qp(qp, &remote) ?: send_qp_info(endpoint->socket, qp);
	}
	if (qp)
		ib_destroy_qp(qp);
}

static int listen_socket(struct socket **listener)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int err = sock_create_kern(&init_net, PF_INET, SOCK_STREAM, IPPROTO_TCP, listener);

	if (err)
		return err;
	sock_set_reuseaddr((*listener)->sk);
	err = kernel_bind(*listener, (struct sockaddr_unsized *)&address, sizeof(address));
	return err ?: kernel_listen(*listener, clients);
}

static int accept_socket(struct socket *listener, struct endpoint *endpoint)
{
	int err = kernel_accept(listener, &endpoint->socket, 0);

	if (!err)
		tcp_sock_set_nodelay(endpoint->socket->sk);
	return err;
}

/* Client and server. */

/* Runs the work of all endpoints at the same time. */
static int run_all(struct endpoint *endpoints, work_func_t work)
{
	struct workqueue_struct *queue = alloc_workqueue("kite_connect", WQ_UNBOUND, clients);
	int err = 0;
	uint i;

	if (!queue)
		return -ENOMEM;
	for (i = 0; i < clients; i++) {
		INIT_WORK(&endpoints[i].work, work);
		queue_work(queue, &endpoints[i].work);
	}
	destroy_workqueue(queue);
	for (i = 0; i < clients && !err; i++)
		err = endpoints[i].err;
	return err;
}

static int serve(struct endpoint *endpoints)
{
	struct socket *listener = NULL;
	int err = listen_socket(&listener);
	uint i;

	for (i = 0; i < clients && !err; i++)
		err = accept_socket(listener, &endpoints[i]);
	if (listener)
		sock_release(listener);
	return err ?: run_all(endpoints, serve_one);
}

static int connect(struct endpoint *endpoints, u64 *times)
{
	u64 start, all = (u64)clients * count;
	int err = 0;
	uint i;

	for (i = 0; i < clients && !err; i++) {
		endpoints[i].times = times + (size_t)i * count;
		err = connect_endpoint(&endpoints[i]);
	}
	if (err)
		return err;
	start = ktime_get_ns();
	err = run_all(endpoints, connect_all);
	per_second = div64_u64(all * NSEC_PER_SEC, ktime_get_ns() - start);
	median_ns = median_of(times, all);
	return err;
}

static int open_device(void)
{
	struct ib_cq_init_attr cq_attr = { .cqe = 2 * MAX_SEND_WR };
	int err = ib_query_port(device, PORT, &port_attr);

	if (err)
		return err;
	pd = ib_alloc_pd(device, 0);
	if (IS_ERR(pd))
		return PTR_ERR(pd);
	cq = ib_create_cq(device, NULL, NULL, NULL, &cq_attr);
	return PTR_ERR_OR_ZERO(cq);
}

static void close_device(void)
{
	if (!IS_ERR_OR_NULL(cq))
		ib_destroy_cq(cq);
	if (!IS_ERR_OR_NULL(pd))
		ib_dealloc_pd(pd);
}

static int measure(void)
{
	struct endpoint *endpoints = kcalloc(clients, sizeof(*endpoints), GFP_KERNEL);
	u64 *times = kvmalloc_array(clients, sizeof(*times) * count, GFP_KERNEL);
	int err = -ENOMEM;
	uint i;

	if (endpoints && times)
		err = open_device() ?: (server ? connect(endpoints, times) : serve(endpoints));
	for (i = 0; endpoints && i < clients; i++)
		if (endpoints[i].socket)
			sock_release(endpoints[i].socket);
	close_device();
	kvfree(times);
	kfree(endpoints);
	return err;
}

/* The device is taken from the list that ib_core gives each client. */
static int add_device(struct ib_device *ibdev)
{
	if (device || rdma_protocol_roce(ibdev, PORT) || !ib_device_try_get(ibdev))
		return -EOPNOTSUPP;
	device = ibdev;
	return 0;
}

static struct ib_client client = {
	.name = KBUILD_MODNAME,
	.add = add_device,
};

static int __init kite_connect_init(void)
{
	int err = clients && count ? ib_register_client(&client) : -EINVAL;

	if (err)
		return err;
	ib_unregister_client(&client);
	if (!device)
		return -ENODEV;
	err = measure();
	ib_device_put(device);
	return err;
}
module_init(kite_connect_init);

static void __exit kite_connect_exit(void)
{
}
module_exit(kite_connect_exit);

MODULE_DESCRIPTION("Measures connection set-up of RC queue pairs in the kernel");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
