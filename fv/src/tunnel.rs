//! A running tunnel: TUN device, datapath thread, control socket, link monitor and signals, put together.
//! Started by `run` and by `up`.

use std::env;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forestvpn_quantum::config::{DeviceSnapshot, DeviceUpdate};
use forestvpn_quantum::io::{Link, Offloads, Tun, Udp, fd};
use forestvpn_quantum::time::OsEntropy;
use forestvpn_quantum::{ConfigureError, Device, DeviceConfig, Fatal, Gone, Handle, Worker};
use nix::errno::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::cli::Extras;
use crate::clock::Floored;
use crate::control::{Control, ControlServer, ControlSocket, DIRECTORY, Refusal};
use crate::link::{Follower, Next, follow};
use crate::netlink::Netlink;
use crate::uapi::shown;
use crate::{doctor, events, metrics};

/// What is left of an Ethernet frame inside of a tunnel over IPv6, rounded: 1500 - 80.
const DEFAULT_MTU: u16 = 1420;
/// What the kernel gives a TUN device that nobody said anything about.
const KERNEL_MTU: u32 = 1500;

/// A tunnel whose packets a thread carries. It ends by itself when its interface is deleted; dropping it ends it,
/// too.
#[derive(Debug)]
pub(crate) struct Tunnel {
    name: String,
    handle: Handle,
    /// Set by whoever of monitor and datapath thread sees it first.
    deleted: Arc<AtomicBool>,
    control: Option<ControlServer>,
    datapath: Option<JoinHandle<Result<(), Fatal>>>,
}

impl Tunnel {
    /// Makes the interface `ifname`, or takes over the one behind WG_TUN_FD, and starts all that serves it. The
    /// interface is down and has no configuration; packets flow when both have changed. `end` is called when a
    /// signal asks for the end or the socket's file is removed. Handshakes are dated no earlier than `least` (since 1970).
    ///
    /// # Errors
    /// One sentence that says what to do; nothing is left behind.
    pub(crate) fn start(
        ifname: &str,
        extras: &Extras,
        least: Duration,
        end: impl End,
    ) -> Result<Self, String> {
        let offloads = doctor::switched()?;
        let threads = extras.threads.unwrap_or(1);
        let mut tun = match inherited("WG_TUN_FD")? {
            Some(fd) => Tun::from_fd(fd).map_err(|e| format!("WG_TUN_FD: {e}"))?,
            None => {
                let tun = if threads > 2 { Tun::open_multi(ifname) } else { Tun::open(ifname) };
                let tun = tun.map_err(|e| e.to_string())?;
                default_mtu(&tun).map_err(|e| format!("cannot set the MTU of {}: {e}", tun.name()))?;
                tun
            }
        };
        tun.enable(offloads);
        let others =
            others(&tun, threads.into()).map_err(|e| format!("cannot use {threads} threads: {e}"))?;
        let name = tun.name().to_owned();
        let socket = match inherited("WG_UAPI_FD")? {
            Some(fd) => ControlSocket::inherited(fd::listener(fd).map_err(|e| format!("WG_UAPI_FD: {e}"))?),
            None => ControlSocket::open(Path::new(DIRECTORY), &name)?,
        };
        let tunnel = Self::assemble(name, (tun, others), socket, (offloads, extras, least), end)
            .map_err(|e| format!("cannot start: {e}"))?;
        if let Some(address) = extras.metrics {
            let (name, handle) = (tunnel.name.clone(), tunnel.handle.clone());
            metrics::serve(address, move || numbers(&name, &handle).ok())?;
            log::info!("metrics at http://{address}/metrics");
        }
        Ok(tunnel)
    }

    fn assemble(
        name: String,
        (tun, others): (Tun, Vec<Tun>),
        socket: ControlSocket,
        (offloads, extras, least): (Offloads, &Extras, Duration),
        end: impl End,
    ) -> io::Result<Self> {
        let link = Link::new(&tun)?;
        let config = DeviceConfig {
            mtu: DEFAULT_MTU,
            train_cipher: offloads.cipher,
            mss: extras.mss.unwrap_or_default(),
            ..DeviceConfig::default()
        };
        let device = Device::new(config, Box::new(OsEntropy));
        let (mut worker, handle) =
            Worker::new(device, tun, Udp::with_offloads(offloads), Floored::new(least))?;
        worker.set_merging(offloads.tun_gro);
        worker.set_merging_udp(offloads.tun_gro && offloads.tun_udp_gro);
        let carriers = others.into_iter().map(|tun| worker.carrier(tun, offloads, Floored::new(least)));
        for mut carrier in carriers.collect::<io::Result<Vec<_>>>()? {
            // It ends when the worker does, and the other way round.
            let run = move || carrier.run();
            thread::Builder::new().name("carrier".into()).spawn(run)?;
        }
        events::log_all(worker.events())?;
        let datapath = thread::Builder::new().name("datapath".into()).spawn(move || worker.run())?;
        let mut tunnel = Self {
            name,
            handle: handle.clone(),
            deleted: Arc::default(),
            control: None,
            datapath: Some(datapath),
        };
        end_on_signals(handle.clone(), end.clone())?;
        let deleted = Arc::clone(&tunnel.deleted);
        follow(link, Monitor { handle: handle.clone(), deleted, trouble: String::new(), short: None })?;
        let at_removal = handle.clone();
        let removed = move || {
            log::info!("the control socket was removed; ending");
            end(&at_removal);
        };
        tunnel.control = Some(socket.serve(Arc::new(Controlled { handle, offloads }), removed)?);
        Ok(tunnel)
    }

    /// The interface's name when it was opened.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// To configure and to stop it, from any thread.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// It has ended, or is about to.
    pub(crate) fn is_over(&self) -> bool {
        self.datapath.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until it ends.
    ///
    /// # Errors
    /// When it ended because something broke, and not because that was wanted.
    pub(crate) fn wait(mut self) -> Result<(), String> {
        match self.datapath.take().map(JoinHandle::join) {
            None | Some(Ok(Ok(()))) => {}
            Some(Ok(Err(Fatal::TunGone))) => self.deleted.store(true, Ordering::Relaxed),
            Some(Ok(Err(fatal))) => return Err(fatal.to_string()),
            Some(Err(_)) => return Err("the datapath thread ended by a fault in fv; please report it".into()),
        }
        if self.deleted.load(Ordering::Relaxed) {
            log::info!("the interface was deleted; ending");
        }
        Ok(())
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        // First nobody can come in any more, then the lights go out.
        self.control = None;
        self.handle.stop();
        if let Some(datapath) = self.datapath.take() {
            let _ = datapath.join();
        }
    }
}

/// What is told to Prometheus.
fn numbers(name: &str, handle: &Handle) -> Result<String, Gone> {
    let (device, status, counters) = (handle.snapshot()?, handle.status()?, handle.counters()?);
    let unread = doctor::report::unread(device.listen_port);
    Ok(metrics::render(&metrics::Numbers {
        interface: name,
        device: &device,
        status: &status,
        counters: &counters,
        unread,
    }))
}

/// What is done when the end is asked for; [`Handle::stop`] for most.
pub(crate) trait End: Fn(&Handle) + Clone + Send + 'static {}
impl<F: Fn(&Handle) + Clone + Send + 'static> End for F {}

struct Monitor {
    handle: Handle,
    deleted: Arc<AtomicBool>,
    /// What was said last about a link that does not come up; said once, tried again each second.
    trouble: String,
    /// What was said last about socket buffers.
    short: Option<String>,
}

impl Monitor {
    /// Says it when the sockets got less than they wanted, once.
    fn look_at_buffers(&mut self) {
        let sockets = self.handle.status().ok().and_then(|status| status.udp);
        let Some(sockets) = sockets else { return };
        let short = doctor::small_buffers(sockets.buffers);
        if let Some(text) = short.as_ref().filter(|_| short != self.short) {
            log::warn!("{text}");
        }
        self.short = short;
    }
}

impl Follower for Monitor {
    fn changed(&mut self, up: bool, mtu: u16) -> Next {
        match self.handle.set_link(up, mtu) {
            Ok(()) => {
                self.trouble.clear();
                if up {
                    self.look_at_buffers();
                }
                Next::Watch
            }
            Err(ConfigureError::Gone) => Next::End,
            Err(e) => {
                let trouble = e.to_string();
                if trouble != self.trouble {
                    log::error!("the interface is up, the tunnel is not: {trouble}");
                    self.trouble = trouble;
                }
                Next::Again
            }
        }
    }

    fn gone(&mut self) {
        self.deleted.store(true, Ordering::Relaxed);
        self.handle.stop();
    }
}

/// What the control socket controls.
struct Controlled {
    handle: Handle,
    offloads: Offloads,
}

fn gone(gone: Gone) -> Refusal {
    Refusal { errno: Errno::EIO, text: gone.to_string() }
}

impl Control for Controlled {
    fn configure(&self, update: DeviceUpdate) -> Result<(), Refusal> {
        self.handle.configure(update).map_err(|e| {
            let errno = match &e {
                ConfigureError::Bind { source, .. } | ConfigureError::Mark { source, .. } => {
                    source.raw_os_error().map_or(Errno::EADDRINUSE, Errno::from_raw)
                }
                // As the kernel says it.
                ConfigureError::TooManyPeers => Errno::ENOMEM,
                ConfigureError::Gone | _ => Errno::EIO,
            };
            Refusal { errno, text: e.to_string() }
        })
    }

    fn snapshot(&self) -> Result<DeviceSnapshot, Refusal> {
        self.handle.snapshot().map_err(gone)
    }

    fn report(&self) -> Result<String, Refusal> {
        let (status, counters) = (self.handle.status().map_err(gone)?, self.handle.counters().map_err(gone)?);
        let port = self.snapshot()?.listen_port;
        Ok(doctor::report::text(&status, &counters, self.offloads, port))
    }
}

/// The descriptor whose number is in the environment variable `variable`, if it is set.
fn inherited(variable: &str) -> Result<Option<OwnedFd>, String> {
    let Some(word) = env::var(variable).ok().filter(|word| !word.is_empty()) else {
        return Ok(None);
    };
    let number =
        word.parse().map_err(|_| format!("{variable}={}: a descriptor is a number", shown(&word)))?;
    fd::inherit(number).map(Some).map_err(|e| format!("{variable}={number}: {e}"))
}

/// What threads beside the first read: the same queue, when it is one, or queues of their own.
fn others(tun: &Tun, threads: usize) -> io::Result<Vec<Tun>> {
    if threads < 2 {
        return Ok(Vec::new());
    }
    if threads > 2 {
        match tun.further_queues(threads - 1) {
            Ok(queues) => return Ok(queues),
            Err(e) => {
                log::warn!("2 threads carry packets, not {threads}, as the TUN device has one queue: {e}")
            }
        }
    }
    Ok(vec![tun.share()?])
}

/// Leaves an MTU alone that somebody chose for an interface that was there before.
fn default_mtu(tun: &Tun) -> Result<(), String> {
    match Netlink::open().and_then(|mut netlink| netlink.link(tun.name())).map_err(|e| e.to_string())? {
        Some(link) if link.mtu == KERNEL_MTU => tun.set_mtu(DEFAULT_MTU).map_err(|e| e.to_string()),
        _ => Ok(()),
    }
}

/// The first signal ends the tunnel in order, the second says that this goes on, the third ends the process at
/// once: whoever presses Ctrl-C twice shall not be left with half of the rules and servers.
fn end_on_signals(handle: Handle, end: impl End) -> io::Result<()> {
    // Whoever started us with nohup wants us to outlive the terminal.
    let ends: &[i32] = if ignored(SIGHUP) { &[SIGINT, SIGTERM] } else { &[SIGINT, SIGTERM, SIGHUP] };
    let mut signals = Signals::new(ends)?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        for (count, signal) in signals.forever().enumerate() {
            match count {
                0 => {
                    log::info!("signal {signal}; ending");
                    end(&handle);
                }
                1 => log::warn!(
                    "signal {signal} again: still undoing what was set up; one more ends at once and leaves the \
                     rest as it is"
                ),
                _ => std::process::exit(128_i32.saturating_add(signal)),
            }
        }
    })?;
    Ok(())
}

fn ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    mask & 1_u64.wrapping_shl(signal.unsigned_abs().wrapping_sub(1)) != 0
}
