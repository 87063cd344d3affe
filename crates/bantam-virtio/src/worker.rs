//! The thread behind an active device.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::sys::{self, EventFd, Interest, Poller};
use crate::warned::Warned;
use crate::{ActiveQueue, Chain, Error, Result};

/// Chains handled between two looks at the stop signal and before the driver is interrupted.
const BATCH: usize = 64;

/// The stop signal as the thread sees it.
pub(crate) struct Stop {
    requested: Arc<AtomicBool>,
    event: EventFd,
}

impl Stop {
    /// Whether the thread is to end.
    pub(crate) fn requested(&self) -> bool {
        self.requested.load(Ordering::Acquire)
    }

    /// Readable once the thread is to end.
    pub(crate) fn event(&self) -> &EventFd {
        &self.event
    }
}

/// A running thread; dropping it stops and joins it.
pub(crate) struct Worker {
    name: &'static str,
    requested: Arc<AtomicBool>,
    event: EventFd,
    thread: Option<JoinHandle<()>>,
    failed: Arc<Warned>,
}

impl Worker {
    /// Starts `body` on a thread called `name`. A driver can have a device's worker started again and
    /// again; that one `failed` is told once.
    pub(crate) fn spawn(
        name: &'static str,
        failed: &Arc<Warned>,
        body: impl FnOnce(&Stop) -> io::Result<()> + Send + 'static,
    ) -> Result<Worker> {
        let start = || -> io::Result<Worker> {
            let requested = Arc::new(AtomicBool::new(false));
            let event = sys::event_fd()?;
            let stop = Stop {
                requested: requested.clone(),
                event: event.try_clone()?,
            };
            let warned = failed.clone();
            let thread = std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || {
                    if let Err(error) = body(&stop)
                        && warned.first()
                    {
                        tracing::error!(device = name, %error, "worker failed");
                    }
                })?;
            Ok(Worker {
                name,
                requested,
                event,
                thread: Some(thread),
                failed: failed.clone(),
            })
        };
        start().map_err(|source| Error::Worker {
            device: name,
            source,
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.requested.store(true, Ordering::Release);
        if let Err(error) = self.event.write(1)
            && self.failed.first()
        {
            tracing::error!(device = self.name, %error, "waking the worker to stop it");
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && self.failed.first()
        {
            tracing::error!(device = self.name, "worker panicked");
        }
    }
}

/// A device whose queues are independent streams of requests, each answered at once.
pub(crate) trait RequestHandler: Send {
    /// Answers one chain: gives the number of bytes written to it.
    ///
    /// # Errors
    /// The device itself is beyond use; the queue is stopped and the driver told to reset.
    fn handle(&mut self, queue: u16, chain: &Chain, memory: &crate::GuestRam) -> io::Result<u32>;
}

/// Serves `queues` with `handler` until stopped.
pub(crate) fn serve_requests(
    stop: &Stop,
    mut queues: Vec<ActiveQueue>,
    mut handler: impl RequestHandler,
) -> io::Result<()> {
    const STOP: u64 = u64::MAX;
    let mut poller = Poller::new()?;
    poller.add(sys::event_as_fd(stop.event()), STOP, Interest::READ)?;
    for (token, queue) in (0..).zip(&queues) {
        poller.add(sys::event_as_fd(queue.kick()), token, Interest::READ)?;
    }
    // Buffers made available before the kick descriptor existed (after a hand-over) get no kick.
    for queue in &mut queues {
        serve_queue(stop, queue, &mut handler);
    }
    let mut ready = Vec::new();
    while !stop.requested() {
        ready.clear();
        poller.wait(&mut ready, None)?;
        for event in &ready {
            let Some(queue) = usize::try_from(event.token)
                .ok()
                .and_then(|token| queues.get_mut(token))
            else {
                continue;
            };
            if event.hung_up || sys::drain(queue.kick()).is_err() {
                // Not a descriptor that can be waited for; level-triggered, it would never rest.
                queue.mark_broken(&"its kick descriptor failed");
                poller.remove(sys::event_as_fd(queue.kick()))?;
                continue;
            }
            serve_queue(stop, queue, &mut handler);
        }
    }
    Ok(())
}

/// Answers everything available on `queue`.
fn serve_queue(stop: &Stop, queue: &mut ActiveQueue, handler: &mut impl RequestHandler) {
    loop {
        queue.disable_kicks();
        loop {
            let handled = serve_batch(queue, handler);
            queue.notify();
            if stop.requested() || handled < BATCH {
                break;
            }
        }
        if stop.requested() || !queue.enable_kicks() {
            return;
        }
    }
}

/// Answers up to [`BATCH`] chains; gives how many.
fn serve_batch(queue: &mut ActiveQueue, handler: &mut impl RequestHandler) -> usize {
    let memory = queue.memory().clone();
    for handled in 0..BATCH {
        let Some(chain) = queue.pop() else {
            return handled;
        };
        match handler.handle(queue.index(), &chain, &memory) {
            Ok(written) => queue.push_used(chain, written),
            Err(error) => {
                queue.push_used(chain, 0);
                queue.mark_broken(&error);
            }
        }
    }
    BATCH
}
