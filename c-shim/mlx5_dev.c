// SPDX-License-Identifier: GPL-2.0
/*
 * The device: mlx5_core of a protection domain, capabilities, events, memory keys, address vectors.
 *
 * Locking: the xarray locks of `dcts` and `qps` are taken in event handlers, with interrupts off.
 * No lock of the shim is taken under them. They protect the objects from destruction while an
 * event completes them.
 */
#include <linux/auxiliary_bus.h>
#include <linux/pci.h>
#include <linux/random.h>
#include <linux/slab.h>

#include "mlx5_objects.h"

/* Matches the auxiliary device of mlx5_ib, a child of the PCI function like the IB device. */
static int is_rdma_adev(struct device *device, const void *unused)
{
	return device->bus && !strcmp(device->bus->name, "auxiliary") &&
	       strstarts(dev_name(device), MLX5_ADEV_NAME ".rdma.");
}

static struct mlx5_core_dev *find_mdev(struct ib_device *ibdev)
{
	struct mlx5_core_dev *mdev;
	struct device *child;

	if (ibdev->ops.driver_id != RDMA_DRIVER_MLX5 || !ibdev->dev.parent)
		return NULL;
	/*
	 * While mlx5_ib probes, its auxiliary device may not be found yet: on PCI use the parent.
	 */
	if (dev_is_pci(ibdev->dev.parent))
		return pci_get_drvdata(to_pci_dev(ibdev->dev.parent));
	child = device_find_child(ibdev->dev.parent, NULL, is_rdma_adev);
	if (!child)
		return NULL;
	mdev = container_of(to_auxiliary_dev(child), struct mlx5_adev, adev)->mdev;
	/* mdev outlives the IB device. */
	put_device(child);
	return mdev;
}

/* Reads the PD number from the context of local_dma_lkey: verbs do not export it. */
static int query_pdn(struct kite_mlx5_dev *dev)
{
	const int len = MLX5_ST_SZ_BYTES(query_mkey_out);
	void *out, *mkc;
	int err;

	out = kvzalloc(len, GFP_KERNEL);
	if (!out)
		return -ENOMEM;
	mkc = MLX5_ADDR_OF(query_mkey_out, out, memory_key_mkey_entry);
	err = mlx5_core_query_mkey(dev->mdev, dev->pd->local_dma_lkey, out, len);
	if (!err)
		dev->pdn = MLX5_GET(mkc, mkc, pd);
	kvfree(out);
	return err;
}

/* The DCT is removed from the xarray under its lock before it is freed. */
static void on_dct_drained(struct kite_mlx5_dev *dev, u32 dctn)
{
	struct kite_mlx5_dct *dct;
	unsigned long flags;

	xa_lock_irqsave(&dev->dcts, flags);
	dct = xa_load(&dev->dcts, dctn);
	if (dct)
		complete(&dct->drained);
	xa_unlock_irqrestore(&dev->dcts, flags);
}

static void last_wqe_reached(struct kite_mlx5_dev *dev, u32 qpn)
{
	struct kite_mlx5_qp *qp;
	unsigned long flags;

	xa_lock_irqsave(&dev->qps, flags);
	qp = xa_load(&dev->qps, qpn);
	if (qp)
		complete(&qp->last_wqe_reached);
	xa_unlock_irqrestore(&dev->qps, flags);
}

/* Completes all waiters: a failed device raises no further events. */
static void on_device_error(struct kite_mlx5_dev *dev)
{
	struct kite_mlx5_dct *dct;
	struct kite_mlx5_qp *qp;
	unsigned long flags;
	unsigned long i;

	xa_lock_irqsave(&dev->dcts, flags);
	xa_for_each(&dev->dcts, i, dct)
		complete(&dct->drained);
	xa_unlock_irqrestore(&dev->dcts, flags);
	xa_lock_irqsave(&dev->qps, flags);
	xa_for_each(&dev->qps, i, qp)
		complete(&qp->last_wqe_reached);
	xa_unlock_irqrestore(&dev->qps, flags);
	if (dev->on_fatal)
		dev->on_fatal(dev->context);
}

static int on_event(struct notifier_block *events, unsigned long type, void *data)
{
	struct kite_mlx5_dev *dev = container_of(events, struct kite_mlx5_dev, events);
	const struct mlx5_eqe *eqe = data;

	switch (type) {
	case MLX5_EVENT_TYPE_DCT_DRAINED:
		on_dct_drained(dev, be32_to_cpu(eqe->data.dct.dctn) & QPN_MASK);
		break;
	case MLX5_EVENT_TYPE_SRQ_LAST_WQE:
		last_wqe_reached(dev, be32_to_cpu(eqe->data.qp_srq.qp_srq_n) & QPN_MASK);
		break;
	case MLX5_DEV_EVENT_SYS_ERROR:
		on_device_error(dev);
		break;
	}
	/* Other notifiers of the chain run too. */
	return NOTIFY_DONE;
}

static bool is_supported(struct mlx5_core_dev *mdev)
{
	return mdev && (!mlx5_lag_is_active(mdev) || MLX5_CAP_GEN(mdev, lag_dct));
}

struct kite_mlx5_dev *kite_mlx5_open(struct ib_pd *pd, void (*on_fatal)(void *context),
				     void *context)
{
	struct mlx5_core_dev *mdev = find_mdev(pd->device);
	struct kite_mlx5_dev *dev;
	int err;

	if (!is_supported(mdev))
		return ERR_PTR(-EOPNOTSUPP);
	dev = kzalloc_obj(*dev);
	if (!dev)
		return ERR_PTR(-ENOMEM);
	dev->pd = pd;
	dev->mdev = mdev;
	dev->on_fatal = on_fatal;
	dev->context = context;
	xa_init_flags(&dev->dcts, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&dev->qps, XA_FLAGS_LOCK_IRQ);
	dev->terminate_mkey = mlx5_core_get_terminate_scatter_list_mkey(mdev);
	err = query_pdn(dev) ?: mlx5_alloc_bfreg(mdev, &dev->bfreg, false, false);
	if (err) {
		kfree(dev);
		return ERR_PTR(err);
	}
	dev->events.notifier_call = on_event;
	mlx5_notifier_register(mdev, &dev->events);
	if (kite_mlx5_has_failed(dev))
		on_device_error(dev);
	return dev;
}

void kite_mlx5_close(struct kite_mlx5_dev *dev)
{
	mlx5_notifier_unregister(dev->mdev, &dev->events);
	mlx5_free_bfreg(dev->mdev, &dev->bfreg);
	WARN_ON(!xa_empty(&dev->dcts) || !xa_empty(&dev->qps));
	kfree(dev);
}

static bool has_atomics(struct mlx5_core_dev *mdev)
{
	const u32 operations = MLX5_ATOMIC_OPS_CMP_SWAP | MLX5_ATOMIC_OPS_FETCH_ADD;
	const u32 size = MLX5_ATOMIC_CAPS_ATOMIC_SIZE_QP_8_BYTES;

	return MLX5_CAP_GEN(mdev, atomic) &&
	       (MLX5_CAP_ATOMIC(mdev, atomic_operations) & operations) == operations &&
	       (MLX5_CAP_ATOMIC(mdev, atomic_size_qp) & size) &&
	       (!MLX5_CAP_GEN(mdev, dct) || MLX5_CAP_ATOMIC(mdev, atomic_size_dc) & size) &&
	       MLX5_CAP_ATOMIC(mdev, atomic_req_8B_endianness_mode);
}

void kite_mlx5_query(struct kite_mlx5_dev *dev, struct kite_mlx5_caps *caps)
{
	struct mlx5_core_dev *mdev = dev->mdev;

	*caps = (struct kite_mlx5_caps) {
		.dc = MLX5_CAP_GEN(mdev, dct),
		.atomics = has_atomics(mdev),
		.max_rd_atomic = BIT(MLX5_CAP_GEN(mdev, log_max_ra_req_dc)),
		.max_dest_rd_atomic = BIT(MLX5_CAP_GEN(mdev, log_max_ra_res_dc)),
		.max_qp_wqebbs = BIT(MLX5_CAP_GEN(mdev, log_max_qp_sz)),
		.max_cqe = BIT(MLX5_CAP_GEN(mdev, log_max_cq_sz)),
	};
}

/* Sets the fields that all memory keys share. */
static void set_mkey_common(struct kite_mlx5_dev *dev, void *mkc, int access)
{
	MLX5_SET(mkc, mkc, pd, dev->pdn);
	MLX5_SET(mkc, mkc, qpn, QPN_MASK);
	/* A variant byte at random: a stale key with the same index is rejected. */
	MLX5_SET(mkc, mkc, mkey_7_0, get_random_u8());
	MLX5_SET(mkc, mkc, lr, 1);
	MLX5_SET(mkc, mkc, lw, !!(access & IB_ACCESS_LOCAL_WRITE));
	MLX5_SET(mkc, mkc, rr, !!(access & IB_ACCESS_REMOTE_READ));
	MLX5_SET(mkc, mkc, rw, !!(access & IB_ACCESS_REMOTE_WRITE));
	MLX5_SET(mkc, mkc, a, !!(access & IB_ACCESS_REMOTE_ATOMIC));
}

int kite_mlx5_global_mkey_create(struct kite_mlx5_dev *dev, int access, u32 *key)
{
	u32 in[MLX5_ST_SZ_DW(create_mkey_in)] = {};
	void *mkc = MLX5_ADDR_OF(create_mkey_in, in, memory_key_mkey_entry);

	MLX5_SET(mkc, mkc, access_mode_1_0, MLX5_MKC_ACCESS_MODE_PA);
	MLX5_SET(mkc, mkc, length64, 1);
	set_mkey_common(dev, mkc, access);
	return mlx5_core_create_mkey(dev->mdev, key, in, sizeof(in));
}

int kite_mlx5_mtt_mkey_create(struct kite_mlx5_dev *dev, u64 addr, u64 len, int access,
			      const dma_addr_t *pages, u32 count, u32 *key)
{
	/* Translations are counted in octwords. */
	const u32 octwords = DIV_ROUND_UP(count, 2);
	const size_t size = MLX5_ST_SZ_BYTES(create_mkey_in) + octwords * 2 * sizeof(__be64);
	void *in = kvzalloc(size, GFP_KERNEL);
	__be64 *translations;
	void *mkc;
	u32 i;
	int err;

	if (!in)
		return -ENOMEM;
	mkc = MLX5_ADDR_OF(create_mkey_in, in, memory_key_mkey_entry);
	translations = (__be64 *)MLX5_ADDR_OF(create_mkey_in, in, klm_pas_mtt);
	for (i = 0; i < count; i++)
		translations[i] = cpu_to_be64(pages[i]);
	MLX5_SET(create_mkey_in, in, translations_octword_actual_size, octwords);
	MLX5_SET(mkc, mkc, access_mode_1_0, MLX5_MKC_ACCESS_MODE_MTT);
	MLX5_SET(mkc, mkc, translations_octword_size, octwords);
	MLX5_SET(mkc, mkc, log_page_size, PAGE_SHIFT);
	MLX5_SET64(mkc, mkc, start_addr, addr);
	MLX5_SET64(mkc, mkc, len, len);
	set_mkey_common(dev, mkc, access);
	err = mlx5_core_create_mkey(dev->mdev, key, in, size);
	kvfree(in);
	return err;
}

int kite_mlx5_mkey_destroy(struct kite_mlx5_dev *dev, u32 key)
{
	return mlx5_core_destroy_mkey(dev->mdev, key);
}

/*
 * The address vector is taken from an address handle of mlx5_ib. Of the functions that create
 * handles, rdma_create_user_ah() alone resolves the destination MAC.
 */
int kite_mlx5_av_resolve(struct kite_mlx5_dev *dev, struct rdma_ah_attr *attr,
			 struct kite_mlx5_av *av)
{
	struct ib_ah *ah = rdma_create_user_ah(dev->pd, attr, NULL);

	if (IS_ERR(ah))
		return PTR_ERR(ah);
	BUILD_BUG_ON(sizeof(*av) != sizeof(struct mlx5_av));
	memcpy(av, &to_mah(ah)->av, sizeof(*av));
	rdma_destroy_ah(ah, RDMA_DESTROY_AH_SLEEPABLE);
	return 0;
}

int kite_mlx5_ring_alloc(struct kite_mlx5_dev *dev, struct kite_mlx5_ring *ring, u32 count,
			 u32 size)
{
	struct mlx5_core_dev *mdev = dev->mdev;
	int node = mdev->priv.numa_node;
	int err;

	err = mlx5_db_alloc_node(mdev, &ring->db, node);
	if (err)
		return err;
	err = mlx5_frag_buf_alloc_node(mdev, count * size, &ring->buf, node);
	if (err) {
		mlx5_db_free(mdev, &ring->db);
		return err;
	}
	mlx5_init_fbc(ring->buf.frags, ilog2(size), ilog2(count), &ring->fbc);
	ring->count = count;
	return 0;
}

void kite_mlx5_ring_free(struct kite_mlx5_dev *dev, struct kite_mlx5_ring *ring)
{
	mlx5_frag_buf_free(dev->mdev, &ring->buf);
	mlx5_db_free(dev->mdev, &ring->db);
}
