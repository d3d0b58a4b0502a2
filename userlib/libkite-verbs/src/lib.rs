// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Verbs over kite for unmodified programs. When preloaded, this library provides the functions of libibverbs and
//! librdmacm, and shows one device, `kite0`, which has virtual queue pairs as QPs. kite-verbs(7) lists what is
//! supported.
//!
//! # Operation
//!
//! Programs address objects by pointers to structures of the header ([`object`]). Behind them are a [`session`] for
//! each open device, [`memory`], completion queues ([`cq`]), [`channel`]s, and QPs ([`qp`]). No call is forwarded to
//! libibverbs, which has no part in these objects.
//!
//! A QP listens on the port of kite that equals its number. Once the program sets number and node of the remote QP, the
//! QP connects to that port and sends through the connection. It receives through the connection that the remote QP
//! opens to its own port. So the programs exchange the same information as with any device. For programs that leave the
//! exchange to librdmacm, [`cm`] does it.

mod channel;
mod cm;
mod cq;
mod device;
mod errno;
mod event_queue;
mod eventfd;
mod header;
mod limits;
mod memory;
mod object;
mod pending;
mod poller;
mod qp;
mod session;
mod sync;
mod unsupported;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    /// Functions that use no objects of this library, only their public part, or objects that cannot be created.
    const NOT_INTERPOSED: &[&str] = &[
        "ibv_ack_async_event",
        "ibv_destroy_ah",
        "ibv_destroy_srq",
        "ibv_event_type_str",
        "ibv_fork_init",
        "ibv_get_async_event",
        "ibv_get_device_name",
        "ibv_is_fork_initialized",
        "ibv_modify_srq",
        "ibv_node_type_str",
        "ibv_port_state_str",
        "ibv_query_srq",
        "ibv_rate_to_mbps",
        "ibv_rate_to_mult",
        "ibv_static_providers",
        "ibv_unimport_dm",
        "ibv_unimport_mr",
        "ibv_unimport_pd",
        "ibv_wc_status_str",
        "ibv_wr_opcode_str",
        "rdma_destroy_srq",
        "rdma_event_str",
    ];

    /// Returns the names of the functions that the header declares without a body.
    fn function_names(header: &str) -> Vec<&str> {
        let mut before = "";
        let mut found = Vec::new();
        for line in header.lines() {
            let is_inline = line.contains("static inline") || before == "static inline";
            let name = line.split_once('(').map_or("", |(start, _)| start);
            let name = name.rsplit([' ', '*']).next().unwrap_or_default();
            let is_prototype = line.starts_with(char::is_alphabetic) && !line.starts_with(name);
            let bare = name.trim_start_matches('_');
            let is_one = bare.starts_with("ibv_") || bare.starts_with("rdma_");
            if !is_inline && is_prototype && is_one {
                found.push(name);
            }
            before = line;
        }
        found
    }

    /// Returns the contents of all sources in a folder.
    fn read_sources(folder: &Path) -> String {
        let files = fs::read_dir(folder).unwrap();
        let files = files.map(|file| file.unwrap().path());
        let read = |path: PathBuf| match path.is_dir() {
            true => read_sources(&path),
            false => fs::read_to_string(path).unwrap(),
        };
        files
            .filter(|path| !path.ends_with("lib.rs"))
            .map(read)
            .collect()
    }

    #[test]
    fn every_header_function_is_interposed_or_listed() {
        let source_text = read_sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let words: HashSet<_> = source_text.split(|c| !is_word(c)).collect();
        for (header, least) in [
            ("infiniband/verbs.h", 60),
            ("rdma/rdma_cma.h", 35),
            ("rdma/rdma_verbs.h", 2),
        ] {
            let header = fs::read_to_string(Path::new("/usr/include").join(header)).unwrap();
            let functions = function_names(&header);
            assert!(functions.len() > least, "{functions:?}");
            for name in functions {
                assert_ne!(
                    words.contains(name),
                    NOT_INTERPOSED.contains(&name),
                    "{name}"
                );
            }
        }
    }
}
